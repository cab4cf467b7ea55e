"""Benchmarks of tu_symmetry: ``python -m benchmarks [subject ...]``.

Every module of this folder whose name has no leading underscore is a subject: its ``run(settings)`` returns a
:class:`benchmarks._report.Section`. Adding a file is all that it takes to add a subject.
"""
