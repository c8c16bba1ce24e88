"""From files to the ledger, the plots and the page. Reads what the jobs left, computes no model."""

from posttrain.core.methods import Method

METHODS: dict[str, Method] = {}
