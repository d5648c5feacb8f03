"""May a compiled model server replace the eager one? servers is under test, loadtests drives it, analysis judges."""
