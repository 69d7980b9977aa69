"""The separator of pairs, as tokenizer.json names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triptych_services.worker.runner.startup.encoder import read_pair_separator


def template(second_type: int) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "pair": [
            {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": second_type}},
            {"SpecialToken": {"id": "[SEP]", "type_id": second_type}},
        ],
        "special_tokens": {"[CLS]": {"ids": [7]}, "[SEP]": {"ids": [8]}},
    }


@pytest.mark.parametrize(
    ("processor", "separator"),
    [
        (template(1), 8),
        (template(0), None),
        ({"type": "Sequence", "processors": [{"type": "ByteLevel"}, template(1)]}, 8),
        ({"type": "BertProcessing", "sep": ["[SEP]", 102], "cls": ["[CLS]", 101]}, 102),
        ({"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0]}, None),
        ({"type": "TemplateProcessing", "pair": "$A $B"}, None),
        ({"type": "BertProcessing", "sep": []}, None),
        (None, None),
    ],
)
def test_the_token_before_a_second_text_of_type_1(
    processor: Any, separator: int | None, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"post_processor": processor}))
    assert read_pair_separator(tmp_path) == separator


def test_there_may_be_no_tokenizer(tmp_path: Path) -> None:
    assert read_pair_separator(tmp_path) is None
