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
