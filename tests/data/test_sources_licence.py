import json

import pytest

from meshwright.config_data import SourceKeys
from meshwright.data.licence import without_licence
from meshwright.data.sources import open_source

CODE = "fn main() {}\n"
MIT = "Copyright 2020 The Authors", "Licensed under the MIT licence; see LICENSE"


@pytest.mark.parametrize(
    "comment",
    [
        "// {}\n// {}\n",
        "# {}\n#\n# {}\n",
        "-- {}\n-- {}\n",
        ";; {}\n; {}\n",
        "/* {}\n * {}\n */\n",
        "/*! {} */ // {}\n",
        "<!-- {}\n{} -->\n",
        '"""{}\n\n{}\n"""\n',
        "'''{} {}'''\n",
        "  // {}\r\n  // {}\r\n",
        "// SPDX-License-Identifier: MIT\n",
        "# copyright (c) me\n",
    ],
)
def test_a_first_comment_with_a_licence_goes(comment):
    head = comment.format(*MIT)
    rest = CODE if not head.startswith("/*!") else f" // {MIT[1]}\n{CODE}"
    assert without_licence(head + CODE) == rest
    if rest is CODE:
        assert without_licence(f"\n\n{head}\r\n\n{CODE}") == CODE
        assert without_licence(head) == ""


def test_what_runs_a_file_and_says_its_encoding_stays():
    first = "#!/usr/bin/env python3\n# -*- coding: utf-8 -*-\n"
    assert without_licence(f"{first}# Copyright me\n\n# What it does\n{CODE}") == f"{first}# What it does\n{CODE}"
    assert without_licence(f"#!/bin/sh\n\n# Copyright me\n{CODE}") == f"#!/bin/sh\n{CODE}"
    xml = '<?xml version="1.0" encoding="utf-8"?>'
    assert without_licence(f"{xml}\n<!-- Copyright me -->\n<a/>\n") == f"{xml}<a/>\n"


def test_documentation_behind_a_licence_stays():
    assert without_licence("// Copyright me\n//! Docs.\n" + CODE) == "//! Docs.\n" + CODE
    assert without_licence("/* Copyright me */\n/* More. */\n") == "/* More. */\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        CODE,
        "\n\n// What it does.\n" + CODE,
        "// What it does.\n\n// Copyright me\n" + CODE,
        CODE + "// Copyright me\n",
        '#include "license.h"\n' + CODE,
        "# define LICENSE 1\n" + CODE,
        "#ifndef COPYRIGHT_H\n",
        '#![doc = "licence"]\n' + CODE,
        "--[[ Copyright me\nand you ]]\n",
        "/* Copyright me, and never closed\n" + CODE,
        "#!/usr/bin/license\n" + CODE,
        "---\nlicense: mit\n---\n",
        "Copyright me\n",
    ],
)
def test_all_else_is_left_exactly_as_it_is(text):
    assert without_licence(text) == text


def test_it_is_off_unless_asked_for(tmp_path):
    text = "// Copyright me\n" + CODE
    (tmp_path / "a.rs").write_text(text, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    (tmp_path / "c.rs").write_text("// Copyright me\n", encoding="utf-8")

    def texts(**keys):
        return [
            document.text or document.fault for document in open_source(str(tmp_path), SourceKeys(**keys)).documents()
        ]

    assert texts() == [text, text, "// Copyright me\n"]
    assert texts(strip_licence=True) == [CODE, CODE, "empty"]
