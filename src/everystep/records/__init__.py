"""The record of generations: lines of JSON, written step by step, and their reader.

Nothing here knows the engine: a record is numbers, ids and names, and nobody trusts its texts.
"""

from __future__ import annotations

from everystep.records.reader import EndToken as EndToken
from everystep.records.reader import GrowingRecord as GrowingRecord
from everystep.records.reader import Record as Record
from everystep.records.reader import RecordedDraft as RecordedDraft
from everystep.records.reader import RecordedRow as RecordedRow
from everystep.records.reader import RecordedRun as RecordedRun
from everystep.records.reader import RecordedStep as RecordedStep
from everystep.records.reader import read_record as read_record
from everystep.records.record_lines import VERSION as VERSION
from everystep.records.record_lines import Line as Line
from everystep.records.record_lines import exact as exact
from everystep.records.record_lines import exact_all as exact_all
from everystep.records.record_lines import spelled as spelled
from everystep.records.redaction import redact_record as redact_record
from everystep.records.writer import RecordWriter as RecordWriter
from everystep.records.writer import record_writer as record_writer
