"""The ledger, the plots and the page: cheap jobs that read files alone."""

from posttrain.report.sections import SECTIONS

SEEDS = canonical(study.seeds)
ARMS = canonical(study.arms)
MEASURED = canonical(explained(study.measurements))
# Methods with a section of their own on the page: those that this tier has.
METHODS = [name for name in ("prism", "d3") if name in study.sections["midtrain"]]
METHODS += ["tail_kd"] if study.sections["distill"] else []
METHODS += ["crispedit"] if study.sections["edit"] else []
METHOD_PLOTS = [plot for name in METHODS for plot in SECTIONS[name]]
PLOTS = ["rl_curves", "before_after", "rank_reversal", "weights", "retention"]


rule claims:
    input:
        measured(),
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
    conda:
        "../../envs/posttrain.yaml"
    threads: 1
    resources:
        nodes=1,
        gpu=0,
        mem_mb=2000,
        runtime=20,
    params:
        root=lambda wildcards, output: str(Path(output.csv).parent),
        seeds=SEEDS,
        arms=ARMS,
        code=lambda wildcards: code_digest("posttrain.report.claims"),
    message:
        "Write the claims ledger"
    shell:
        launched(
            "posttrain.report.claims",
            "--root {params.root:q} --seeds {params.seeds:q} --arms {params.arms:q}"
            " --claims {input.claims:q} --output {output.csv:q}",
        )


rule plots:
    input:
        evaluations("reasoning"),
        evaluations("retention"),
    output:
        rl_curves=report(
            f"{ROOT}/report/rl_curves.svg",
            caption="../report/plots.rst",
            category="Plots",
            labels={"plot": "reward over GRPO steps"},
        ),
        before_after=report(
            f"{ROOT}/report/before_after.svg",
            caption="../report/plots.rst",
            category="Plots",
            labels={"plot": "pass@1 before and after RL"},
        ),
        rank_reversal=report(
            f"{ROOT}/report/rank_reversal.svg",
            caption="../report/plots.rst",
            category="Plots",
            labels={"plot": "SFT score against post-RL score"},
        ),
        weights=report(
            f"{ROOT}/report/weights.svg",
            caption="../report/plots.rst",
            category="Plots",
            labels={"plot": "PEAR's weights over SFT"},
        ),
        retention=report(
            f"{ROOT}/report/retention.svg",
            caption="../report/plots.rst",
            category="Plots",
            labels={"plot": "loss on held-out real text"},
        ),
    log:
        f"logs/{study.tier}/report/plots.log",
    benchmark:
        f"benchmarks/jobs/{study.tier}/report/plots.tsv"
    conda:
        "../../envs/posttrain.yaml"
    threads: 1
    resources:
        nodes=1,
        gpu=0,
        mem_mb=2000,
        runtime=20,
    params:
        root=lambda wildcards, output: str(Path(output.rl_curves).parents[1]),
        seeds=SEEDS,
        arms=ARMS,
        tasks=canonical(study.tasks),
        code=lambda wildcards: code_digest("posttrain.report.plots"),
    message:
        "Draw RL curves, rank reversal, weights and retention"
    shell:
        launched(
            "posttrain.report.plots",
            "--root {params.root:q} --seeds {params.seeds:q} --arms {params.arms:q}"
            " --tasks {params.tasks:q} --output {output.rl_curves:q}",
        )


rule prism_plots:
    input:
        lambda wildcards: [
            path for path in measured() if Path(path).parts[-3].startswith("prism")
        ],
        of_method("midtrain", "prism"),
    output:
        **{
            name: report(
                f"{ROOT}/report/{name}.svg",
                caption="../report/plots.rst",
                category="PRISM",
                labels={"plot": title},
            )
            for name, title in SECTIONS["prism"].items()
        },
    log:
        f"logs/{study.tier}/report/prism_plots.log",
    benchmark:
        f"benchmarks/jobs/{study.tier}/report/prism_plots.tsv"
    conda:
        "../../envs/posttrain.yaml"
    threads: 1
    resources:
        nodes=1,
        gpu=0,
        mem_mb=2000,
        runtime=20,
    params:
        root=lambda wildcards, output: str(Path(output.prism_rl).parents[1]),
        seeds=SEEDS,
        arms=ARMS,
        tasks=canonical(study.tasks),
        code=lambda wildcards: code_digest("posttrain.report.prism"),
    message:
        "Draw PRISM's plots"
    shell:
        launched(
            "posttrain.report.prism",
            "--root {params.root:q} --seeds {params.seeds:q} --arms {params.arms:q}"
            " --tasks {params.tasks:q} --output {output.prism_rl:q}",
        )


rule d3_plots:
    input:
        of_method("midtrain", "testbed"),
        of_method("midtrain", "d3"),
    output:
        **{
            name: report(
                f"{ROOT}/report/{name}.svg",
                caption="../report/plots.rst",
                category="D3",
                labels={"plot": title},
            )
            for name, title in SECTIONS["d3"].items()
        },
    log:
        f"logs/{study.tier}/report/d3_plots.log",
    benchmark:
        f"benchmarks/jobs/{study.tier}/report/d3_plots.tsv"
    conda:
        "../../envs/posttrain.yaml"
    threads: 1
    resources:
        nodes=1,
        gpu=0,
        mem_mb=2000,
        runtime=20,
    params:
        root=lambda wildcards, output: str(Path(output.d3_graph).parents[1]),
        seeds=SEEDS,
        arms=ARMS,
        tasks=canonical(study.tasks),
        code=lambda wildcards: code_digest("posttrain.report.d3"),
    message:
        "Draw D3's plots"
    shell:
        launched(
            "posttrain.report.d3",
            "--root {params.root:q} --seeds {params.seeds:q} --arms {params.arms:q}"
            " --tasks {params.tasks:q} --output {output.d3_graph:q}",
        )


rule tail_kd_plots:
    input:
        of_method("distill", "known"),
        of_method("distill", "grid"),
        of_method("distill", "tail_kd"),
    output:
        **{
            name: report(
                f"{ROOT}/report/{name}.svg",
                caption="../report/plots.rst",
                category="TAD",
                labels={"plot": title},
            )
            for name, title in SECTIONS["tail_kd"].items()
        },
    log:
        f"logs/{study.tier}/report/tail_kd_plots.log",
    benchmark:
        f"benchmarks/jobs/{study.tier}/report/tail_kd_plots.tsv"
    conda:
        "../../envs/posttrain.yaml"
    threads: 1
    resources:
        nodes=1,
        gpu=0,
        mem_mb=2000,
        runtime=20,
    params:
        root=lambda wildcards, output: str(Path(output.tail_kd_arms).parents[1]),
        seeds=SEEDS,
        arms=ARMS,
        tasks=canonical(study.tasks),
        code=lambda wildcards: code_digest("posttrain.report.tail_kd"),
    message:
        "Draw TAD's plots"
    shell:
        launched(
            "posttrain.report.tail_kd",
            "--root {params.root:q} --seeds {params.seeds:q} --arms {params.arms:q}"
            " --tasks {params.tasks:q} --output {output.tail_kd_arms:q}",
        )


rule crispedit_plots:
    input:
        of_method("edit", "crispedit"),
        of_method("edit", "pretrained"),
    output:
        **{
            name: report(
                f"{ROOT}/report/{name}.svg",
                caption="../report/plots.rst",
                category="CrispEdit",
                labels={"plot": title},
            )
            for name, title in SECTIONS["crispedit"].items()
        },
    log:
        f"logs/{study.tier}/report/crispedit_plots.log",
    benchmark:
        f"benchmarks/jobs/{study.tier}/report/crispedit_plots.tsv"
    conda:
        "../../envs/posttrain.yaml"
    threads: 1
    resources:
        nodes=1,
        gpu=0,
        mem_mb=2000,
        runtime=20,
    params:
        root=lambda wildcards, output: str(Path(output.crispedit_arms).parents[1]),
        seeds=SEEDS,
        arms=ARMS,
        tasks=canonical(study.tasks),
        code=lambda wildcards: code_digest("posttrain.report.crispedit"),
    message:
        "Draw CrispEdit's plots"
    shell:
        launched(
            "posttrain.report.crispedit",
            "--root {params.root:q} --seeds {params.seeds:q} --arms {params.arms:q}"
            " --tasks {params.tasks:q} --output {output.crispedit_arms:q}",
        )


rule page:
    input:
        claims=f"{ROOT}/claims.csv",
        statements="configs/claims.yaml",
        plots=expand(f"{ROOT}/report/{{plot}}.svg", plot=[*PLOTS, *METHOD_PLOTS]),
        measured=measured(),
        template="src/posttrain/report/page.html.j2",
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
    conda:
        "../../envs/posttrain.yaml"
    threads: 1
    resources:
        nodes=1,
        gpu=0,
        mem_mb=2000,
        runtime=20,
    params:
        root=lambda wildcards, output: str(Path(output.html).parents[1]),
        seeds=SEEDS,
        arms=ARMS,
        tasks=canonical(study.tasks),
        measured=MEASURED,
        methods=canonical(METHODS),
        code=lambda wildcards: code_digest("posttrain.report.page"),
    message:
        "Write the report page"
    shell:
        launched(
            "posttrain.report.page",
            "--root {params.root:q} --seeds {params.seeds:q} --arms {params.arms:q}"
            " --tasks {params.tasks:q} --claims {input.statements:q} --output {output.html:q}"
            " --measured {params.measured:q} --methods {params.methods:q}",
        )


# Not part of `all`: `snakemake dashboard` or `make dashboard`.
rule dashboard:
    input:
        evaluations("reasoning"),
        evaluations("retention"),
        template="src/posttrain/report/dashboard.html.j2",
    output:
        html=f"{ROOT}/report/dashboard.html",
    log:
        f"logs/{study.tier}/report/dashboard.log",
    benchmark:
        f"benchmarks/jobs/{study.tier}/report/dashboard.tsv"
    localrule: True
    conda:
        "../../envs/posttrain.yaml"
    threads: 1
    resources:
        nodes=1,
        gpu=0,
        mem_mb=2000,
        runtime=20,
    params:
        root=lambda wildcards, output: str(Path(output.html).parents[1]),
        seeds=SEEDS,
        arms=ARMS,
        tasks=canonical(study.tasks),
        gpus=canonical(study.cards()),
        measured=MEASURED,
        code=lambda wildcards: code_digest("posttrain.report.dashboard"),
    message:
        "Draw the dashboard"
    shell:
        launched(
            "posttrain.report.dashboard",
            "--root {params.root:q} --seeds {params.seeds:q} --arms {params.arms:q}"
            " --tasks {params.tasks:q} --gpus {params.gpus:q} --output {output.html:q}"
            " --measured {params.measured:q}",
        )


# Not part of `all`: `snakemake wandb_sync`, on a machine that reaches W&B.
rule wandb_sync:
    input:
        measured(),
    output:
        table=f"{ROOT}/report/wandb_sync.tsv",
    log:
        f"logs/{study.tier}/report/wandb_sync.log",
    benchmark:
        f"benchmarks/jobs/{study.tier}/report/wandb_sync.tsv"
    localrule: True
    conda:
        "../../envs/posttrain.yaml"
    threads: 1
    resources:
        nodes=1,
        gpu=0,
        mem_mb=2000,
        runtime=600,
    params:
        root=lambda wildcards, output: str(Path(output.table).parents[1]),
        targets=lambda wildcards, input: canonical([str(path) for path in input]),
        code=lambda wildcards: code_digest("posttrain.report.wandb_sync"),
    message:
        "Send artifacts and their lineage to W&B"
    shell:
        launched(
            "posttrain.report.wandb_sync",
            "--root {params.root:q} --targets {params.targets:q} --output {output.table:q}",
        )
