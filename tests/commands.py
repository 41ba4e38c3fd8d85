"""Benchmarks as they are called from a shell."""

import json
import sys


def command(monkeypatch, module, *arguments):
    """Run a benchmark's main with these arguments."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    return module.main()


def last_line(capsys):
    *rows, last = capsys.readouterr().out.splitlines()
    return rows, json.loads(last)
