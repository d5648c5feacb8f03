"""The conditions without which some gates mean nothing, as one table (`analysis.checks.table`)."""
