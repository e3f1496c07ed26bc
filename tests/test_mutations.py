"""The list of faults that the fast tests must find fits the tree; `make mutations` tries each."""

from tests.support.mutate import ROOT, read_mutations


def test_each_mutation_changes_one_place_and_names_tests_that_are_there():
    mutations = read_mutations()
    assert len(mutations) >= 40
    assert len(set(mutations)) == len(mutations)
    for mutation in mutations:
        text = (ROOT / mutation.path).read_text()
        assert mutation.apply(text) != text, mutation
        for test in mutation.tests:
            name, _, function = test.partition("::")
            assert f"def {function}" in (ROOT / "tests" / name).read_text(), mutation
