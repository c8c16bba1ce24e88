"""Measurements of checkpoints."""


rule evaluate_reasoning:
    input:
        unpack(inputs_of("evaluate", "reasoning")),
    output:
        manifest=manifest_of("evaluate", "reasoning"),
    log:
        beside("logs", "evaluate", "reasoning", "log"),
    benchmark:
        beside("benchmarks/jobs", "evaluate", "reasoning", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("evaluate", "reasoning").threads
    resources:
        **allocation("evaluate", "reasoning"),
    params:
        flags=flags_of("evaluate", "reasoning"),
        settings=settings_of("evaluate", "reasoning"),
        code=study.code("evaluate", "reasoning"),
    message:
        "Evaluate {wildcards.checkpoint} on {wildcards.task} (seed {wildcards.seed})"
    shell:
        launched("posttrain.evaluate.reasoning")


rule evaluate_retention:
    input:
        unpack(inputs_of("evaluate", "retention")),
    output:
        manifest=manifest_of("evaluate", "retention"),
    log:
        beside("logs", "evaluate", "retention", "log"),
    benchmark:
        beside("benchmarks/jobs", "evaluate", "retention", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("evaluate", "retention").threads
    resources:
        **allocation("evaluate", "retention"),
    params:
        flags=flags_of("evaluate", "retention"),
        settings=settings_of("evaluate", "retention"),
        code=study.code("evaluate", "retention"),
    message:
        "Text loss of {wildcards.checkpoint} on {wildcards.task} (seed {wildcards.seed})"
    shell:
        launched("posttrain.evaluate.retention")


rule evaluate_lineage:
    input:
        unpack(inputs_of("evaluate", "lineage")),
    output:
        manifest=manifest_of("evaluate", "lineage"),
    log:
        beside("logs", "evaluate", "lineage", "log"),
    benchmark:
        beside("benchmarks/jobs", "evaluate", "lineage", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("evaluate", "lineage").threads
    resources:
        **allocation("evaluate", "lineage"),
    params:
        flags=flags_of("evaluate", "lineage"),
        settings=settings_of("evaluate", "lineage"),
        code=study.code("evaluate", "lineage"),
    message:
        "Compare the checkpoints of {wildcards.lineage} (seed {wildcards.seed})"
    shell:
        launched("posttrain.evaluate.lineage")
