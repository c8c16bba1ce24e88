"""Between base and SFT: mid-training, merging, data order."""


rule midtrain_prism:
    input:
        unpack(inputs_of("midtrain", "prism")),
    output:
        manifest=manifest_of("midtrain", "prism"),
    log:
        beside("logs", "midtrain", "prism", "log"),
    benchmark:
        beside("benchmarks/jobs", "midtrain", "prism", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("midtrain", "prism").threads
    resources:
        **allocation("midtrain", "prism"),
    params:
        flags=flags_of("midtrain", "prism"),
        settings=settings_of("midtrain", "prism"),
        code=study.code("midtrain", "prism"),
    message:
        "Mid-train {wildcards.model} (seed {wildcards.seed})"
    shell:
        launched("posttrain.midtrain.prism")


rule midtrain_merge:
    input:
        unpack(inputs_of("midtrain", "merge")),
    output:
        manifest=manifest_of("midtrain", "merge"),
    log:
        beside("logs", "midtrain", "merge", "log"),
    benchmark:
        beside("benchmarks/jobs", "midtrain", "merge", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("midtrain", "merge").threads
    resources:
        **allocation("midtrain", "merge"),
    params:
        flags=flags_of("midtrain", "merge"),
        settings=settings_of("midtrain", "merge"),
        code=study.code("midtrain", "merge"),
    message:
        "Merge {wildcards.model} (seed {wildcards.seed})"
    shell:
        launched("posttrain.midtrain.merge")


rule midtrain_testbed:
    input:
        unpack(inputs_of("midtrain", "testbed")),
    output:
        manifest=manifest_of("midtrain", "testbed"),
    log:
        beside("logs", "midtrain", "testbed", "log"),
    benchmark:
        beside("benchmarks/jobs", "midtrain", "testbed", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("midtrain", "testbed").threads
    resources:
        **allocation("midtrain", "testbed"),
    params:
        flags=flags_of("midtrain", "testbed"),
        settings=settings_of("midtrain", "testbed"),
        code=study.code("midtrain", "testbed"),
    message:
        "Try all orders of quadratic units: {wildcards.bed}"
    shell:
        launched("posttrain.midtrain.testbed")


rule midtrain_d3:
    input:
        unpack(inputs_of("midtrain", "d3")),
    output:
        manifest=manifest_of("midtrain", "d3"),
    log:
        beside("logs", "midtrain", "d3", "log"),
    benchmark:
        beside("benchmarks/jobs", "midtrain", "d3", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("midtrain", "d3").threads
    resources:
        **allocation("midtrain", "d3"),
    params:
        flags=flags_of("midtrain", "d3"),
        settings=settings_of("midtrain", "d3"),
        code=study.code("midtrain", "d3"),
    message:
        "Schedule units: {wildcards.arm} (seed {wildcards.seed})"
    shell:
        launched("posttrain.midtrain.d3")
