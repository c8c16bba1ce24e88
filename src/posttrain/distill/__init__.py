"""Distillation: a student learns from a teacher's whole next-token distribution."""

from posttrain.core.methods import Method

METHODS = {}
