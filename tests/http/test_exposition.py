"""Merging of several processes' metrics into one text."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llamado.http.monitoring.exposition import merge

TEXT = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 5
# HELP seconds How long it took.
# TYPE seconds histogram
seconds_bucket{le="0.1"} 1
seconds_bucket{le="+Inf"} 2
seconds_sum 0.5
seconds_count 2
"""


def test_samples_are_grouped_by_metric() -> None:
    assert merge([({"model": "a"}, TEXT), ({"model": "b"}, TEXT)]) == (
        "# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.\n"
        "# TYPE llamacpp:prompt_tokens_total counter\n"
        'llamacpp:prompt_tokens_total{model="a"} 5\n'
        'llamacpp:prompt_tokens_total{model="b"} 5\n'
        "# HELP seconds How long it took.\n"
        "# TYPE seconds histogram\n"
        'seconds_bucket{model="a",le="0.1"} 1\n'
        'seconds_bucket{model="a",le="+Inf"} 2\n'
        'seconds_sum{model="a"} 0.5\n'
        'seconds_count{model="a"} 2\n'
        'seconds_bucket{model="b",le="0.1"} 1\n'
        'seconds_bucket{model="b",le="+Inf"} 2\n'
        'seconds_sum{model="b"} 0.5\n'
        'seconds_count{model="b"} 2\n'
    )


@pytest.mark.parametrize(
    ("line", "labels"),
    [
        ("x 1", {}),
        ("x{} 1", {}),
        ('x{a="b",} 1 1700000000', {"a": "b"}),
        ('x{ a = "}\\" 1" , b="model=\\"c\\"" } 1', {"a": '}" 1', "b": 'model="c"'}),
        ('x{model="its own",model_id="m"} 1', {"exported_model": "its own", "model_id": "m"}),
    ],
)
def test_labels_are_kept(line: str, labels: dict[str, str]) -> None:
    name = 'a "model"\\\nof two lines'
    ((sample,),) = [family.samples for family in text_string_to_metric_families(merge([({"model": name}, line)]))]
    assert sample.labels == {"model": name} | labels and sample.value == 1


def test_malformed_lines_are_dropped() -> None:
    assert merge([({"model": "a"}, "# EOF\n# a comment\n<html>\nx{a=b} 1\n1x 2\nx\n\ny 2\r\n")]) == 'y{model="a"} 2\n'


def test_blanks_between_labels_are_accepted() -> None:
    text = 'm {a="1" , b = "x\\"} y",} 5 7\nn 1\no{} 2\nm{a="1"  b="2"  x\nm{a  =  "1'
    assert merge([({"r": "1"}, text)]) == 'm{r="1",a="1",b="x\\"} y"} 5 7\nn{r="1"} 1\no{r="1"} 2\n'
