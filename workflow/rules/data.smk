"""Real text and verifiable tasks."""


rule data_corpus:
    input:
        unpack(inputs_of("data", "corpus")),
    output:
        manifest=manifest_of("data", "corpus"),
    log:
        beside("logs", "data", "corpus", "log"),
    benchmark:
        beside("benchmarks/jobs", "data", "corpus", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("data", "corpus").threads
    resources:
        **allocation("data", "corpus"),
    params:
        flags=flags_of("data", "corpus"),
        settings=settings_of("data", "corpus"),
        code=study.code("data", "corpus"),
    message:
        "Fetch and split real text: {wildcards.corpus}"
    shell:
        launched("posttrain.data.corpus")


rule data_tasks:
    input:
        unpack(inputs_of("data", "tasks")),
    output:
        manifest=manifest_of("data", "tasks"),
    log:
        beside("logs", "data", "tasks", "log"),
    benchmark:
        beside("benchmarks/jobs", "data", "tasks", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("data", "tasks").threads
    resources:
        **allocation("data", "tasks"),
    params:
        flags=flags_of("data", "tasks"),
        settings=settings_of("data", "tasks"),
        code=study.code("data", "tasks"),
    message:
        "Generate verifiable items: {wildcards.task} (seed {wildcards.seed})"
    shell:
        launched("posttrain.data.tasks")


rule data_tokenizer:
    input:
        unpack(inputs_of("data", "tokenizer")),
    output:
        manifest=manifest_of("data", "tokenizer"),
    log:
        beside("logs", "data", "tokenizer", "log"),
    benchmark:
        beside("benchmarks/jobs", "data", "tokenizer", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("data", "tokenizer").threads
    resources:
        **allocation("data", "tokenizer"),
    params:
        flags=flags_of("data", "tokenizer"),
        settings=settings_of("data", "tokenizer"),
        code=study.code("data", "tokenizer"),
    message:
        "Build tokenizer: {wildcards.tokenizer}"
    shell:
        launched("posttrain.data.tokenizer")


rule data_mix:
    input:
        unpack(inputs_of("data", "mix")),
    output:
        manifest=manifest_of("data", "mix"),
    log:
        beside("logs", "data", "mix", "log"),
    benchmark:
        beside("benchmarks/jobs", "data", "mix", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("data", "mix").threads
    resources:
        **allocation("data", "mix"),
    params:
        flags=flags_of("data", "mix"),
        settings=settings_of("data", "mix"),
        code=study.code("data", "mix"),
    message:
        "Tokenise mix: {wildcards.mix} (seed {wildcards.seed})"
    shell:
        launched("posttrain.data.mix")


rule data_facts:
    input:
        unpack(inputs_of("data", "facts")),
    output:
        manifest=manifest_of("data", "facts"),
    log:
        beside("logs", "data", "facts", "log"),
    benchmark:
        beside("benchmarks/jobs", "data", "facts", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("data", "facts").threads
    resources:
        **allocation("data", "facts"),
    params:
        flags=flags_of("data", "facts"),
        settings=settings_of("data", "facts"),
        code=study.code("data", "facts"),
    message:
        "Take facts: {wildcards.facts}"
    shell:
        launched("posttrain.data.facts")


rule data_domains:
    input:
        unpack(inputs_of("data", "domains")),
    output:
        manifest=manifest_of("data", "domains"),
    log:
        beside("logs", "data", "domains", "log"),
    benchmark:
        beside("benchmarks/jobs", "data", "domains", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("data", "domains").threads
    resources:
        **allocation("data", "domains"),
    params:
        flags=flags_of("data", "domains"),
        settings=settings_of("data", "domains"),
        code=study.code("data", "domains"),
    message:
        "Generate reasoning domains: {wildcards.task} (seed {wildcards.seed})"
    shell:
        launched("posttrain.data.domains")


rule data_edits:
    input:
        unpack(inputs_of("data", "edits")),
    output:
        manifest=manifest_of("data", "edits"),
    log:
        beside("logs", "data", "edits", "log"),
    benchmark:
        beside("benchmarks/jobs", "data", "edits", "tsv")
    conda:
        "../../envs/posttrain.yaml"
    threads: study.resources("data", "edits").threads
    resources:
        **allocation("data", "edits"),
    params:
        flags=flags_of("data", "edits"),
        settings=settings_of("data", "edits"),
        code=study.code("data", "edits"),
    message:
        "Make edits: {wildcards.edits} (seed {wildcards.seed})"
    shell:
        launched("posttrain.data.edits")
