"""The graphs of an arm: `tailgate inspect`. Which shapes find their graph ready, and which graphs there are."""
