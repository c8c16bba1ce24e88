# The workflow lives in workflow/Snakefile; this file lets `snakemake` find it from the repository's root.
include: "workflow/Snakefile"


# An included file cannot set the default target of the file that includes it.
rule default:
    default_target: True
    input:
        rules.all.input,
    localrule: True
    message:
        "The study is complete"
