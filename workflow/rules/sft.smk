"""Stored traces, SFT arms, cost of the weights."""


rule sft_traces:
    input:
        unpack(inputs_of("sft", "traces")),
    output:
        manifest=manifest_of("sft", "traces"),
    log:
        beside("logs", "sft", "traces", "log"),
    benchmark:
        beside("benchmarks/jobs", "sft", "traces", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("sft", "traces").threads
    resources:
        **allocation("sft", "traces"),
    params:
        flags=flags_of("sft", "traces"),
        settings=settings_of("sft", "traces"),
        code=study.code("sft", "traces"),
    message:
        "Store traces with behaviour log-probabilities: {wildcards.task} (seed {wildcards.seed})"
    shell:
        launched("posttrain.sft.traces")


rule sft_train:
    input:
        unpack(inputs_of("sft", "train")),
    output:
        manifest=manifest_of("sft", "train"),
    log:
        beside("logs", "sft", "train", "log"),
    benchmark:
        beside("benchmarks/jobs", "sft", "train", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("sft", "train").threads
    resources:
        **allocation("sft", "train"),
    params:
        flags=flags_of("sft", "train"),
        settings=settings_of("sft", "train"),
        code=study.code("sft", "train"),
    message:
        "SFT {wildcards.arm} on {wildcards.task} (seed {wildcards.seed})"
    shell:
        launched("posttrain.sft.train")


rule sft_overhead:
    input:
        unpack(inputs_of("sft", "overhead")),
    output:
        manifest=manifest_of("sft", "overhead"),
    log:
        beside("logs", "sft", "overhead", "log"),
    benchmark:
        beside("benchmarks/jobs", "sft", "overhead", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("sft", "overhead").threads
    resources:
        **allocation("sft", "overhead"),
    params:
        flags=flags_of("sft", "overhead"),
        settings=settings_of("sft", "overhead"),
        code=study.code("sft", "overhead"),
    message:
        "Time PEAR weights against SFT on {wildcards.task} (seed {wildcards.seed})"
    shell:
        launched("posttrain.sft.overhead")
