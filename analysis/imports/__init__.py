"""Result files of other load tools, read as records of a run."""
