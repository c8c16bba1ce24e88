"""GRPO from the base and from every SFT arm."""


rule rl_grpo:
    input:
        unpack(inputs_of("rl", "grpo")),
    output:
        manifest=manifest_of("rl", "grpo"),
    log:
        beside("logs", "rl", "grpo", "log"),
    benchmark:
        beside("benchmarks/jobs", "rl", "grpo", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("rl", "grpo").threads
    resources:
        **allocation("rl", "grpo"),
    params:
        flags=flags_of("rl", "grpo"),
        settings=settings_of("rl", "grpo"),
        code=study.code("rl", "grpo"),
    message:
        "GRPO on {wildcards.task} from {wildcards.start} (seed {wildcards.seed})"
    shell:
        launched("posttrain.rl.grpo")


rule rl_passes:
    input:
        unpack(inputs_of("rl", "passes")),
    output:
        manifest=manifest_of("rl", "passes"),
    log:
        beside("logs", "rl", "passes", "log"),
    benchmark:
        beside("benchmarks/jobs", "rl", "passes", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("rl", "passes").threads
    resources:
        **allocation("rl", "passes"),
    params:
        flags=flags_of("rl", "passes"),
        settings=settings_of("rl", "passes"),
        code=study.code("rl", "passes"),
    message:
        "Count right samples of {wildcards.checkpoint} on {wildcards.task} (seed {wildcards.seed})"
    shell:
        launched("posttrain.rl.passes")
