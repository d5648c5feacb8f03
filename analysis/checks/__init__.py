"""The conditions without which some gates mean nothing, as one table (`tailgate.analysis.checks.table`)."""
