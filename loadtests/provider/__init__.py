"""Answers of a run to those who move the weights of production traffic themselves: Argo Rollouts and Flagger."""

from __future__ import annotations

from typing import Final

TOKEN_VARIABLE: Final = "TAILGATE_PROVIDER_TOKEN"
