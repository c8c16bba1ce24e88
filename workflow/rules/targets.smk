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


rule pear:
    input:
        evaluations("reasoning", lambda task, checkpoint: task in study.tasks),
        of_method("sft", "overhead"),
        rules.claims.output,
    message:
        "PEAR's comparison is complete: see {rules.claims.output.html}"


rule prism:
    input:
        evaluations("reasoning", lambda task, checkpoint: task == "prism"),
        evaluations(
            "retention", lambda task, checkpoint: task in ("prism", "prism_long")
        ),
        of_method("evaluate", "lineage"),
    message:
        "PRISM's comparison is complete: see {rules.claims.output.html}"


rule d3:
    input:
        of_method("midtrain", "testbed"),
        of_method("midtrain", "d3"),
    message:
        "D3's comparison is complete: see {rules.claims.output.html}"


rule tail_kd:
    input:
        of_method("distill", "known"),
        of_method("distill", "grid"),
        of_method("distill", "tail_kd"),
        of_method("distill", "overhead"),
    message:
        "TAD's comparison is complete: see {rules.claims.output.html}"


rule crispedit:
    input:
        of_method("edit", "crispedit"),
        of_method("edit", "pretrained"),
        evaluations("reasoning", lambda task, checkpoint: task == "crispedit"),
        evaluations("retention", lambda task, checkpoint: task == "crispedit"),
    message:
        "CrispEdit's comparison is complete: see {rules.claims.output.html}"
