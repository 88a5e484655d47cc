"""docs/matched.md and the README say what the tests say; EXPECTTEST_ACCEPT=1 writes both."""

from __future__ import annotations

import os
from pathlib import Path

import spellings
from arithmetic import BIASED, SCALED_AFTER, SCALED_BEFORE, SIGNED_AFTER, SIGNED_BEFORE, WITH_ADDEND
from families import FAMILIES, UNTRACED
from refused_tails import CASES
from shared_places import PLACES
from test_tensor_scales import BEFORE, HELD

README = Path(__file__).parent.parent / "README.md"
BEGIN = "<!-- written from the tests' tables: tests/test_matched_table.py -->"
END = "<!-- end -->"
PAGE = Path(__file__).parent.parent / "docs" / "matched.md"

SPELLINGS_TEXT = """Each in bf16, fp16 and fp32, with static shapes, `mark_dynamic` and
`dynamic=True`, with numbers; in one of these cells also on two ranks whose inputs differ. So are
the numbers, tensors, biases and places of a shared expert below."""
NUMBERS_TEXT = """`y` is the reduced sum, `shared` an addend of each rank. In fp16 no addend that
comes after the reduction is scaled up."""
SCALES_TEXT = """`s` and `t` are tensors of one element, `y` the reduced sum, `shared` an addend of
each rank. Of several elements they are refused."""
FAMILIES_TEXT = """One layer over two ranks: fused tails without a finalize, the MoE tail by where
its shared expert joins it, and the all_reduces that are left."""


def code(*tables):
    return "; ".join(f"`{case}`" for each in tables for case in each)


def table(*rows):
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def spelling_table(*more):
    return table(
        ("part", "spellings"),
        ("finalize", "; ".join(spellings.FINALIZE)),
        ("RMSNorm", "; ".join(spellings.NORMS)),
        ("all_reduce", "; ".join(spellings.ALL_REDUCES)),
        *more,
    )


def readme():
    """The README with its table of what is matched."""
    head, rest = README.read_text().split(BEGIN)
    found = spelling_table(
        ("shared expert", "; ".join(PLACES)),
        ("numbers", code(SIGNED_BEFORE, SIGNED_AFTER)),
        (
            "tensors of one element",
            code(SCALED_BEFORE, SCALED_AFTER),
        ),
        ("bias", code(BIASED)),
    )
    return f"{head}{BEGIN}\n{found}\n{END}{rest.split(END)[1]}"


def page():
    parts = (
        "# What is matched and what is refused",
        "Written from the tables that the tests run: see `tests/test_matched_table.py`.",
        "## Spellings\n\n" + SPELLINGS_TEXT,
        spelling_table(),
        "## Numbers\n\n" + NUMBERS_TEXT,
        table(
            ("part", "spellings"),
            ("before the all_reduce", code(SIGNED_BEFORE)),
            ("after the all_reduce", code(SIGNED_AFTER)),
        ),
        "## Scales that are tensors\n\n" + SCALES_TEXT,
        table(
            ("part", "spellings"),
            ("held as", "; ".join(dict.fromkeys(hold for hold, *_ in HELD))),
            ("on the routed experts", "; ".join(BEFORE)),
            ("before the all_reduce", code(SCALED_BEFORE)),
            (
                "after the all_reduce",
                code(SCALED_AFTER, WITH_ADDEND),
            ),
        ),
        "## Biases after the all_reduce\n\n" + code(BIASED),
        "## Places of a shared expert",
        table(
            ("place", "finalize", "found as", "all_reduces"),
            *(
                (name, form, shared, f"{before} -> {after}")
                for name, (_, (form, shared, before, after)) in PLACES.items()
            ),
        ),
        "## Families of transformers\n\n" + FAMILIES_TEXT,
        table(
            ("family", "plain tails", "MoE tail", "left"),
            *(
                (name, str(f.plain), f.shared or "not fused", "; ".join(f.refused) or "none")
                for name, f in FAMILIES.items()
            ),
        ),
        table(
            ("family that is not traced", "why"),
            *((name, why) for name, (why, _) in UNTRACED.items()),
        ),
        "## Refused",
        table(
            ("reason", "tail"),
            *((reason, f"`{name}`") for name, (_, reason) in CASES.items()),
        ),
    )
    return "\n\n".join(parts) + "\n"


def test_the_page_is_what_the_tests_say():
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        PAGE.write_text(page())
        README.write_text(readme())
    assert PAGE.read_text() == page()
    assert README.read_text() == readme()
