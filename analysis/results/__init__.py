"""Result files of other load tools: what each says of its requests, as records of ours."""
