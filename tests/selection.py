"""The tests of `make test`. All others have the mark `thorough` and run in `make test-all`.

`make test` proves the product: the folders below whole, of every integration one real training with its seams fired,
counted and undone, the script of the README, and the gates.
"""

from __future__ import annotations

#: Seconds that a test of `make test` may take on two quiet cores (tests/durations.json), if LONG does not name it.
MOST_SECONDS = 3.0
#: Tests that wait for a group's timeout or for a program to end, and the first test of a module that trains.
LONG = (
    *("tests/collectives/test_fault", "tests/collectives/test_missing_ranks.py", "tests/collectives/test_work.py"),
    "tests/collectives/test_all_to_all.py::test_ranks_that_disagree_about_a_run_get_an_error",
    *("tests/api/test_sends.py::test_guarantee_7", "tests/api/test_one_to_many.py::test_guarantee_7"),
    "tests/telemetry/test_run_log.py::test_the_last_line_comes_when_the_process_ends",
    "tests/api/test_operators.py::test_a_plain_import_places_the_namespace_before_torch_and_after",
    "tests/integrations/megatron/test_data_parallel.py::test_training",
    "tests/test_docs.py::test_the_readmes_script_prints_the_readmes_output",
)
FOLDERS = ("codec", "config", "policy", "telemetry", "collectives", "quality", "runtime", "api")
GATES = ("aliases", "autoload", "changed_tests", "docs", "durations", "environment", "house", "layering")
#: Files and tests of other folders; a name ends where a test's name, or a parameter in brackets, begins.
OTHERS = (
    "tests/integrations/test_patching.py",
    "tests/integrations/test_registry.py",
    "tests/integrations/test_undo.py",
    "tests/integrations/test_apex.py",
    "tests/integrations/test_context_parallel.py::test_an_exchange_equals_rounding_and_a_full_precision_exchange",
    "tests/integrations/test_pipelining.py::test_every_schedule_sends_quantized_and_full_precision_is_torchs",
    "tests/integrations/test_pipelining.py::test_undoing_restores_every_function",
    "tests/integrations/ddp/test_ddp_attach.py::test_the_same_bits_as_a_hook_registered_by_hand",
    "tests/integrations/ddp/test_ddp_attach.py::test_disable_restores_ddps_own_bits_and_methods",
    "tests/integrations/ddp/test_hook.py::test_trains_as_without_and_counts_every_bucket",
    "tests/integrations/fsdp/test_fsdp_attach.py::test_the_same_bits_as_set_by_hand",
    "tests/integrations/fsdp/test_fsdp_attach.py::test_disable_restores",
    "tests/integrations/fsdp/test_fsdp_attach.py::test_fsdp1_has_the_bits_of_the_hook_by_hand",
    "tests/integrations/fsdp/test_fsdp2.py::test_trains_as_without_and_counts_every_call",
    "tests/integrations/tensor_parallel/test_placements.py",
    "tests/integrations/tensor_parallel/test_activations.py",
    "tests/integrations/megatron/test_fsdp.py",
    "tests/integrations/megatron/test_seams.py",
    *(
        f"tests/integrations/megatron/test_data_parallel.py::test_{name}"
        for name in (
            "training_stays_close_to_the_stock_run_and_replicas_agree",
            "switched_off_is_bitwise_stock",
            "one_call_a_bucket_and_step_and_nothing_else",
        )
    ),
    "tests/integrations/deepspeed/test_stages.py",
    "tests/integrations/deepspeed/test_section.py",
)
#: Parameters and tests of FOLDERS that take longer than MOST_SECONDS: compilers, many ranks, programs that end.
EXCEPT = (
    "[inductor]",
    "[aot_eager]",
    "::test_guarantee_8_zeros_of_all_ranks_are_zero_in_the_result[5]",
    "::test_guarantee_8_zeros_of_all_ranks_are_zero_in_the_result[8]",
    "::test_guarantee_8_zeros_of_all_ranks_are_zero_in_the_result[8-3]",
    "tests/integrations/tensor_parallel/test_placements.py::"
    "test_a_training_reaches_the_loss_of_full_precision_and_copies_stay_equal[4-True-False-updates3-expected3]",
    "::test_the_program_ends[in flight]",
    "::test_the_program_ends[waited]",
    "::test_additional_entries_of_a_state_are_found",
    "::test_compiled_is_reference[mse]",
    "::test_compiled_is_reference[hadamard+mse]",
)
_WHOLE = tuple(f"tests/{folder}/" for folder in FOLDERS) + tuple(f"tests/test_{gate}.py" for gate in GATES)


def is_product(test: str) -> bool:
    """Return True if `make test` runs the test (a node's id)."""
    if test.endswith(EXCEPT):
        return False
    return test.startswith(_WHOLE) or any(test == one or test.startswith((f"{one}::", f"{one}[")) for one in OTHERS)
