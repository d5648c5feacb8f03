"""Made-up servers whose truth is known, to hold the statistics to."""
