"""Sections of the page: how methods are written, and the plots of those that have a section of their own."""

from __future__ import annotations

NAMES = {"pear": "PEAR", "prism": "PRISM", "d3": "D³", "tail_kd": "TAD", "crispedit": "CrispEdit"}
SECTIONS = {  # method -> plot -> title; each file holds one drawing, named after the method
    "prism": {
        "prism_retention": "Retention over mid-training",
        "prism_rl": "RL by starting point",
        "prism_effects": "Mid-training mix against RL mix",
        "prism_cka": "Representations by layer",
        "prism_landscape": "The plane between base, mid-trained and RL",
        "prism_frontier": "Solvability frontier",
    },
    "d3": {
        "d3_curves": "Loss over training by schedule",
        "d3_graph": "Influence graph and order",
        "d3_testbed": "Exact test bed",
    },
    "tail_kd": {
        "tail_kd_arms": "Forward KL and tail mass by loss",
        "tail_kd_ranks": "Probability by the teacher's rank",
        "tail_kd_grid": "K against β",
        "tail_kd_text": "Distillation on text",
    },
    "crispedit": {
        "crispedit_frontier": "Capability drift against generality",
        "crispedit_arms": "What each editor reaches and damages",
        "crispedit_refusals": "Refusing as an edit",
    },
}
