"""Distillation: known sources, stored teachers, arms on text and traces, cost of the loss."""


rule distill_source:
    input:
        unpack(inputs_of("distill", "source")),
    output:
        manifest=manifest_of("distill", "source"),
    log:
        beside("logs", "distill", "source", "log"),
    benchmark:
        beside("benchmarks/jobs", "distill", "source", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("distill", "source").threads
    resources:
        **allocation("distill", "source"),
    params:
        flags=flags_of("distill", "source"),
        settings=settings_of("distill", "source"),
        code=study.code("distill", "source"),
    message:
        "Draw known sources: {wildcards.source} (seed {wildcards.seed})"
    shell:
        launched("posttrain.distill.source")


rule distill_known:
    input:
        unpack(inputs_of("distill", "known")),
    output:
        manifest=manifest_of("distill", "known"),
    log:
        beside("logs", "distill", "known", "log"),
    benchmark:
        beside("benchmarks/jobs", "distill", "known", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("distill", "known").threads
    resources:
        **allocation("distill", "known"),
    params:
        flags=flags_of("distill", "known"),
        settings=settings_of("distill", "known"),
        code=study.code("distill", "known"),
    message:
        "Distil from known sources: {wildcards.arm} (seed {wildcards.seed})"
    shell:
        launched("posttrain.distill.known")


rule distill_grid:
    input:
        unpack(inputs_of("distill", "grid")),
    output:
        manifest=manifest_of("distill", "grid"),
    log:
        beside("logs", "distill", "grid", "log"),
    benchmark:
        beside("benchmarks/jobs", "distill", "grid", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("distill", "grid").threads
    resources:
        **allocation("distill", "grid"),
    params:
        flags=flags_of("distill", "grid"),
        settings=settings_of("distill", "grid"),
        code=study.code("distill", "grid"),
    message:
        "Vary K and beta on known sources: {wildcards.study} (seed {wildcards.seed})"
    shell:
        launched("posttrain.distill.grid")


rule distill_teacher:
    input:
        unpack(inputs_of("distill", "teacher")),
    output:
        manifest=manifest_of("distill", "teacher"),
    log:
        beside("logs", "distill", "teacher", "log"),
    benchmark:
        beside("benchmarks/jobs", "distill", "teacher", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("distill", "teacher").threads
    resources:
        **allocation("distill", "teacher"),
    params:
        flags=flags_of("distill", "teacher"),
        settings=settings_of("distill", "teacher"),
        code=study.code("distill", "teacher"),
    message:
        "Store a teacher's log-probabilities: {wildcards.task} (seed {wildcards.seed})"
    shell:
        launched("posttrain.distill.teacher")


rule distill_tail_kd:
    input:
        unpack(inputs_of("distill", "tail_kd")),
    output:
        manifest=manifest_of("distill", "tail_kd"),
    log:
        beside("logs", "distill", "tail_kd", "log"),
    benchmark:
        beside("benchmarks/jobs", "distill", "tail_kd", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("distill", "tail_kd").threads
    resources:
        **allocation("distill", "tail_kd"),
    params:
        flags=flags_of("distill", "tail_kd"),
        settings=settings_of("distill", "tail_kd"),
        code=study.code("distill", "tail_kd"),
    message:
        "Distil {wildcards.arm} on {wildcards.task} (seed {wildcards.seed})"
    shell:
        launched("posttrain.distill.tail_kd")


rule distill_overhead:
    input:
        unpack(inputs_of("distill", "overhead")),
    output:
        manifest=manifest_of("distill", "overhead"),
    log:
        beside("logs", "distill", "overhead", "log"),
    benchmark:
        beside("benchmarks/jobs", "distill", "overhead", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("distill", "overhead").threads
    resources:
        **allocation("distill", "overhead"),
    params:
        flags=flags_of("distill", "overhead"),
        settings=settings_of("distill", "overhead"),
        code=study.code("distill", "overhead"),
    message:
        "Time steps of each loss on {wildcards.task} (seed {wildcards.seed})"
    shell:
        launched("posttrain.distill.overhead")
