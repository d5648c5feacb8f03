"""The judge of a rollout as a small HTTP service, for those who move the weights themselves: Argo Rollouts, Flagger."""
