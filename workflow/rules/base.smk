"""Base models: from scratch, from a package, from a hub."""


rule base_scratch:
    input:
        unpack(inputs_of("base", "scratch")),
    output:
        manifest=manifest_of("base", "scratch"),
    log:
        beside("logs", "base", "scratch", "log"),
    benchmark:
        beside("benchmarks/jobs", "base", "scratch", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("base", "scratch").threads
    resources:
        **allocation("base", "scratch"),
    params:
        flags=flags_of("base", "scratch"),
        settings=settings_of("base", "scratch"),
        code=study.code("base", "scratch"),
    message:
        "Train {wildcards.model} from scratch (seed {wildcards.seed})"
    shell:
        launched("posttrain.base.scratch")


rule base_packaged:
    input:
        unpack(inputs_of("base", "packaged")),
    output:
        manifest=manifest_of("base", "packaged"),
    log:
        beside("logs", "base", "packaged", "log"),
    benchmark:
        beside("benchmarks/jobs", "base", "packaged", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("base", "packaged").threads
    resources:
        **allocation("base", "packaged"),
    params:
        flags=flags_of("base", "packaged"),
        settings=settings_of("base", "packaged"),
        code=study.code("base", "packaged"),
    message:
        "Convert packaged model {wildcards.model}"
    shell:
        launched("posttrain.base.packaged")


rule base_hub:
    input:
        unpack(inputs_of("base", "hub")),
    output:
        manifest=manifest_of("base", "hub"),
    log:
        beside("logs", "base", "hub", "log"),
    benchmark:
        beside("benchmarks/jobs", "base", "hub", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("base", "hub").threads
    resources:
        **allocation("base", "hub"),
    params:
        flags=flags_of("base", "hub"),
        settings=settings_of("base", "hub"),
        code=study.code("base", "hub"),
    message:
        "Fetch hub model {wildcards.model}"
    shell:
        launched("posttrain.base.hub")
