"""What the stand-ins for packax._ext share: C++ judges calls by rows that a test makes up."""

import pytest


class StandIn:
    @staticmethod
    def variants():
        return []

    @staticmethod
    def part():
        return ""

    @classmethod
    def judge(cls, *question, **options):
        ext = pytest.importorskip("packax._ext")
        return ext.judge(*question, **{"table": list(cls.variants())} | options)

    @classmethod
    def select(cls, *question, **options):
        ext = pytest.importorskip("packax._ext")
        return ext.select(*question, **{"table": list(cls.variants())} | options)

    @classmethod
    def full_build_has(cls, target, call):
        return cls.judge(target, call, [], table=list(cls.whole_table()))["found"]

    @classmethod
    def whole_table(cls):
        return cls.variants()
