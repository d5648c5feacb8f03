import numpy as np
import pyarrow as pa

from analysis.records.fingerprints import fingerprints


def test_texts_differ_in_their_fingerprints_as_they_differ():
    texts = [*(f"1-{index}-{arm}" for index in range(5000) for arm in ("eager", "compiled")), "", "a", "a\0", "\0a"]
    prints = fingerprints(pa.chunked_array([texts[:17], texts[17:]]))
    assert len(np.unique(prints)) == len(texts)
    whole = fingerprints(pa.chunked_array([pa.array(["x", *texts]).slice(1)]))
    assert whole.tolist() == prints.tolist()


def test_a_long_text_has_no_fingerprint():
    assert fingerprints(pa.chunked_array([["x" * 65]])) is None


def test_null_and_nothing_have_fingerprints():
    assert len(fingerprints(pa.chunked_array([[None, "a", None]], pa.string()))) == 3
    assert len(fingerprints(pa.chunked_array([], pa.string()))) == 0
