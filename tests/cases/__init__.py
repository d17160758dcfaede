"""Awkward cases that go through more than one part; docs/cases.md says where each case of the list is tested."""
