"""The labels of a classifier, as config.json names them."""

from __future__ import annotations

from triptych.checkpoint.config_file import ConfigFile

_MAX_LABELS = 1 << 16
_MAX_TEXT = 1 << 16  # characters of a label


def read_labels(config: ConfigFile) -> tuple[str, ...]:
    """Return the labels in the order of the classifier's rows; transformers' defaults where there are none.

    Raises:
        ModelError: They are odd; names key and value.
    """
    section = config.section("id2label")
    num_labels = config.integer("num_labels", default=2 if section is None else len(section.values) or 2)
    if num_labels > _MAX_LABELS:
        config.fail("num_labels", num_labels, f"is above the limit {_MAX_LABELS}")
    if section is None or not section.values:
        return tuple(f"LABEL_{index}" for index in range(num_labels))
    if set(section.values) != {str(index) for index in range(num_labels)}:
        config.fail("id2label", section.values, f"must name each of 0 to {num_labels - 1}")
    labels = tuple(str(section.values[str(index)]) for index in range(num_labels))
    for index, label in enumerate(labels):
        if len(label) > _MAX_TEXT:
            section.fail(str(index), label, f"is longer than {_MAX_TEXT} characters")
    return labels
