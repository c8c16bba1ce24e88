"""What a user asks for by name: everything, a stage, a method."""


localrules:
    all,
    data,
    base,
    sft,
    rl,
    distill,
    edit,
    evaluate_all,
    pear,
    prism,
    d3,
    midtrain,
    tail_kd,
    crispedit,


rule data:
    input:
        of_method("data", "corpus"),
        of_method("data", "tasks"),
        of_method("data", "tokenizer"),
        of_method("data", "mix"),
        of_method("data", "edits"),
    message:
        "All data are ready"


rule base:
    input:
        of_method("base", "scratch"),
        of_method("base", "packaged"),
        of_method("base", "hub"),
    message:
        "All base models are ready"


rule midtrain:
    input:
        of_method("midtrain", "prism"),
        of_method("midtrain", "merge"),
    message:
        "Mid-training is done"


rule sft:
    input:
        of_method("sft", "train"),
    message:
        "All SFT arms are trained"


rule rl:
    input:
        [
            study.path(f"rl/grpo/{task}-{start}", seed)
            for task in study.tasks
            for start in ("base", *study.arms)
            for seed in study.seeds
        ],
    message:
        "RL has run from the base and from every SFT arm"


rule distill:
    input:
        of_method("distill", "known"),
        of_method("distill", "tail_kd"),
    message:
        "Students are distilled"


rule edit:
    input:
        of_method("edit", "crispedit"),
        of_method("edit", "pretrained"),
    message:
        "Edits are made"


rule evaluate_all:
    input:
        evaluations("reasoning"),
        evaluations("retention"),
    message:
        "Every checkpoint is evaluated"


# What each method's claims are about; the ledger of one method needs no more.
OF_METHOD = {
    "pear": [
        *evaluations("reasoning", lambda task, checkpoint: task in study.tasks),
        *of_method("sft", "overhead"),
    ],
    "prism": [
        *evaluations("reasoning", lambda task, checkpoint: task == "prism"),
        *evaluations(
            "retention", lambda task, checkpoint: task in ("prism", "prism_long")
        ),
        *of_method("evaluate", "lineage"),
    ],
    "d3": [*of_method("midtrain", "testbed"), *of_method("midtrain", "d3")],
    "tail_kd": [
        *of_method("distill", "known"),
        *of_method("distill", "grid"),
        *of_method("distill", "tail_kd"),
        *of_method("distill", "overhead"),
    ],
    "crispedit": [
        *of_method("edit", "crispedit"),
        *of_method("edit", "pretrained"),
        *evaluations("reasoning", lambda task, checkpoint: task == "crispedit"),
        *evaluations("retention", lambda task, checkpoint: task == "crispedit"),
    ],
}


rule method_claims:
    input:
        lambda wildcards: OF_METHOD[wildcards.method],
        claims="configs/claims.yaml",
    output:
        csv=f"{ROOT}/ledger/{{method}}.csv",
        parquet=f"{ROOT}/ledger/{{method}}.parquet",
        html=f"{ROOT}/ledger/{{method}}.html",
    log:
        f"logs/{study.tier}/report/claims-{{method}}.log",
    benchmark:
        f"benchmarks/jobs/{study.tier}/report/claims-{{method}}.tsv"
    conda:
        "../../envs/posttrain.yaml"
    threads: 1
    resources:
        nodes=1,
        gpu=0,
        mem_mb=2000,
        runtime=20,
    params:
        root=lambda wildcards, output: str(Path(output.csv).parent.parent),
        seeds=SEEDS,
        arms=ARMS,
        code=lambda wildcards: code_digest("posttrain.report.claims"),
    message:
        "Write the ledger of {wildcards.method} alone"
    shell:
        launched(
            "posttrain.report.claims",
            "--root {params.root:q} --seeds {params.seeds:q} --arms {params.arms:q}"
            " --methods '[\"{wildcards.method}\"]' --claims {input.claims:q} --output {output.csv:q}",
        )


rule pear:
    input:
        OF_METHOD["pear"],
        ledger=f"{ROOT}/ledger/pear.csv",
    message:
        "PEAR's comparison is complete: see {input.ledger} (html beside it)"


rule prism:
    input:
        OF_METHOD["prism"],
        ledger=f"{ROOT}/ledger/prism.csv",
    message:
        "PRISM's comparison is complete: see {input.ledger} (html beside it)"


rule d3:
    input:
        OF_METHOD["d3"],
        ledger=f"{ROOT}/ledger/d3.csv",
    message:
        "D3's comparison is complete: see {input.ledger} (html beside it)"


rule tail_kd:
    input:
        OF_METHOD["tail_kd"],
        ledger=f"{ROOT}/ledger/tail_kd.csv",
    message:
        "TAD's comparison is complete: see {input.ledger} (html beside it)"


rule crispedit:
    input:
        OF_METHOD["crispedit"],
        ledger=f"{ROOT}/ledger/crispedit.csv",
    message:
        "CrispEdit's comparison is complete: see {input.ledger} (html beside it)"
