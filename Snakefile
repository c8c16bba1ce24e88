# The workflow lives in workflow/Snakefile; this file lets `snakemake` find it from the repository's root.
include: "workflow/Snakefile"
