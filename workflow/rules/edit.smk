"""Edits: factors of capability text, edits of from-scratch and of pretrained models."""


rule edit_factors:
    input:
        unpack(inputs_of("edit", "factors")),
    output:
        manifest=manifest_of("edit", "factors"),
    log:
        beside("logs", "edit", "factors", "log"),
    benchmark:
        beside("benchmarks/jobs", "edit", "factors", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("edit", "factors").threads
    resources:
        **allocation("edit", "factors"),
    params:
        flags=flags_of("edit", "factors"),
        settings=settings_of("edit", "factors"),
        code=study.code("edit", "factors"),
    message:
        "Factors of capability text: {wildcards.task} (seed {wildcards.seed})"
    shell:
        launched("posttrain.edit.factors")


rule edit_crispedit:
    input:
        unpack(inputs_of("edit", "crispedit")),
    output:
        manifest=manifest_of("edit", "crispedit"),
    log:
        beside("logs", "edit", "crispedit", "log"),
    benchmark:
        beside("benchmarks/jobs", "edit", "crispedit", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("edit", "crispedit").threads
    resources:
        **allocation("edit", "crispedit"),
    params:
        flags=flags_of("edit", "crispedit"),
        settings=settings_of("edit", "crispedit"),
        code=study.code("edit", "crispedit"),
    message:
        "Edit {wildcards.arm} (seed {wildcards.seed})"
    shell:
        launched("posttrain.edit.crispedit")


rule edit_pretrained:
    input:
        unpack(inputs_of("edit", "pretrained")),
    output:
        manifest=manifest_of("edit", "pretrained"),
    log:
        beside("logs", "edit", "pretrained", "log"),
    benchmark:
        beside("benchmarks/jobs", "edit", "pretrained", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("edit", "pretrained").threads
    resources:
        **allocation("edit", "pretrained"),
    params:
        flags=flags_of("edit", "pretrained"),
        settings=settings_of("edit", "pretrained"),
        code=study.code("edit", "pretrained"),
    message:
        "Edit a pretrained model: {wildcards.arm}"
    shell:
        launched("posttrain.edit.pretrained")
