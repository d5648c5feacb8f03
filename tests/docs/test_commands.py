from __future__ import annotations

from tests.docs.commands import commands, commands_in

PAGE = """# A page

Say `tailgate plan --rate
4` once, never ``tailgate plan`` or `tailgate`.

```
# the first
tailgate run demo       # it takes a while
python benchmarks/engine.py floor \\
    --batch 1,32
```

    make day

```
locust ──▶ arm
```

```toml
tailgate = "no command"
```

```yaml
      - run: tailgate run canary.toml || [ $? -eq 3 ]
```
"""


def test_blocks_steps_indented_lines_and_sentences_are_collected() -> None:
    found = [(item.line, item.text, item.named) for item in commands_in(PAGE, "page.md")]
    assert found == [
        (8, "tailgate run demo       # it takes a while", False),
        (9, "python benchmarks/engine.py floor --batch 1,32", False),
        (24, "tailgate run canary.toml || [ $? -eq 3 ]", False),
        (13, "make day", False),
        (3, "tailgate plan --rate 4", True),
    ]


def test_a_line_has_the_words_of_each_of_its_programs() -> None:
    assert commands("sudo nvidia-smi -pm 1   # stays loaded") == [["nvidia-smi", "-pm", "1"]]
    assert commands("export TOKEN=...") == []
    assert commands("tailgate analyze runs/<id> --slo 'p99_ttft_ms <= 300' | jq .gates") == [
        ["tailgate", "analyze", "runs/20260101T120000Z-canary", "--slo", "p99_ttft_ms <= 300"],
        ["jq", ".gates"],
    ]
    assert commands("(echo '{\"a\": 1}'; sleep 60) | python -m servers.neighbour >> log") == [
        ["echo", '{"a": 1}'],
        ["sleep", "60"],
        ["python", "-m", "servers.neighbour"],
    ]
