"""Unit tests: offline, in a plain environment (see tests/offline.py)."""

from tests.offline import no_network, plain_environment

__all__ = ["no_network", "plain_environment"]
