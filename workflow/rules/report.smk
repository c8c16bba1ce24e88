"""The ledger, the plots and the page: cheap jobs that read files alone."""

SEEDS = canonical(study.seeds)
ARMS = canonical(study.arms)
PLOTS = ["rl_curves", "before_after", "rank_reversal", "weights", "retention"]


rule claims:
    input:
        evaluations("reasoning"),
        [
            study.path(f"sft/overhead/{task}", seed)
            for task in study.names("sft", "overhead", "task")
            for seed in study.seeds
        ],
        claims="configs/claims.yaml",
    output:
        csv=report(
            f"{ROOT}/claims.csv",
            caption="../report/claims.rst",
            category="Claims ledger",
            labels={"table": "every claim, its interval and verdict", "format": "csv"},
        ),
        parquet=f"{ROOT}/claims.parquet",
        html=report(
            f"{ROOT}/claims.html",
            caption="../report/claims.rst",
            category="Claims ledger",
            labels={
                "table": "every claim, its interval and verdict",
                "format": "html",
            },
        ),
    log:
        f"logs/{study.tier}/report/claims.log",
    benchmark:
        f"benchmarks/jobs/{study.tier}/report/claims.tsv"
    threads: 1
    resources:
        nodes=1,
        gpu=0,
        mem_mb=2000,
        runtime=20,
    params:
        root=ROOT,
        seeds=SEEDS,
        arms=ARMS,
        code=lambda wildcards: code_digest("posttrain.report.claims"),
    message:
        "Write the claims ledger"
    shell:
        LAUNCH
        + " -- posttrain.report.claims --root {params.root:q} --seeds {params.seeds:q} --arms {params.arms:q}"
        " --claims {input.claims:q} --output {output.csv:q} > {log} 2>&1"


rule plots:
    input:
        evaluations("reasoning"),
        evaluations("retention"),
    output:
        report(
            expand(f"{ROOT}/report/{{plot}}.svg", plot=PLOTS),
            caption="../report/plots.rst",
            category="Plots",
        ),
    log:
        f"logs/{study.tier}/report/plots.log",
    benchmark:
        f"benchmarks/jobs/{study.tier}/report/plots.tsv"
    threads: 1
    resources:
        nodes=1,
        gpu=0,
        mem_mb=2000,
        runtime=20,
    params:
        root=ROOT,
        seeds=SEEDS,
        arms=ARMS,
        tasks=canonical(study.tasks),
        code=lambda wildcards: code_digest("posttrain.report.plots"),
    message:
        "Draw RL curves, rank reversal, weights and retention"
    shell:
        LAUNCH
        + " -- posttrain.report.plots --root {params.root:q} --seeds {params.seeds:q} --arms {params.arms:q}"
        " --tasks {params.tasks:q} --output {output[0]:q} > {log} 2>&1"


rule page:
    input:
        claims=f"{ROOT}/claims.csv",
        plots=expand(f"{ROOT}/report/{{plot}}.svg", plot=PLOTS),
    output:
        html=report(
            f"{ROOT}/report/index.html",
            caption="../report/page.rst",
            category="Report",
            labels={"page": "the whole study on one page"},
        ),
    log:
        f"logs/{study.tier}/report/page.log",
    benchmark:
        f"benchmarks/jobs/{study.tier}/report/page.tsv"
    threads: 1
    resources:
        nodes=1,
        gpu=0,
        mem_mb=2000,
        runtime=20,
    params:
        root=ROOT,
        seeds=SEEDS,
        arms=ARMS,
        tasks=canonical(study.tasks),
        code=lambda wildcards: code_digest("posttrain.report.page"),
    message:
        "Write the report page"
    shell:
        LAUNCH
        + " -- posttrain.report.page --root {params.root:q} --seeds {params.seeds:q} --arms {params.arms:q}"
        " --tasks {params.tasks:q} --output {output.html:q} > {log} 2>&1"
