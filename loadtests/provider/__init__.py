"""Answers of a run to those who move the weights of production traffic themselves: Argo Rollouts and Flagger."""
