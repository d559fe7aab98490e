"""Which of the states that worlds must reach are shown by tests of their own: see
tests/sim/whole/test_states.py."""

# Tests that play worlds of their own, and which states they demand by name.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "test_tails.py::test_a_run_goes_on_after_it": ("purged messages back",),
    "test_storms.py::test_connections_that_clog_are_released_in_another_order": (
        "clogs",
        "released in another order",
    ),
    "test_storms.py::test_a_run_goes_on_after_each_storm": ("storms", "servers of the hub ended"),
    "test_exporting.py::test_exports_are_asked_for_and_made_by_themselves": (
        "exports gone with their runs",
        "exports made by themselves",
        "exports ready",
    ),
    "test_exporting.py::test_one_that_its_coordinator_did_not_live_to_see_has_failed": (
        "exports cut off by the coordinator's end",
    ),
    "test_exporting.py::test_whatever_an_export_meets_it_ends_and_leaves_nothing": (
        "exports failed",
    ),
    "test_exporting.py::test_models_are_let_write_and_what_they_write_is_read": (
        "files of exports taken home",
        "samples written once all is well",
    ),
    "test_from_within.py::test_a_calm_world_breaks_nothing_and_every_promise_is_looked_at": (
        "restore in force",
        "told: restored",
    ),
    "test_hardships.py::test_all_of_them_strike_and_the_run_ends": (
        "initial parameters half sent",
        "noise to everybody",
        "two coordinators",
        "two learners of a name",
    ),
    "test_hardships.py::test_a_run_goes_on_whenever_the_hub_exchanges_its_leader": (
        "elections",
        "leaders alone",
    ),
    "test_hardships.py::test_leaders_write_leases_for_learners_over_links_that_take_their_time": (
        "hubs that know who writes",
    ),
    "test_hardships.py::"
    "test_a_full_disk_of_the_hub_is_named_and_the_run_goes_on_once_it_has_room": (
        "the hub's disk full",
        "the hub's disk full: found by a try",
        "the hub's disk full: said by the leader",
    ),
    "test_hardships.py::test_a_full_stream_is_named_and_the_run_goes_on_by_itself": (
        "streams narrowed",
        "submitted without room",
        "visitors: lacks_room",
    ),
    "test_hardships.py::test_a_run_that_begins_with_a_checkpoint_ends_too": ("heirs",),
    "test_lies.py::test_a_base_before_the_first_version_ends_no_leader": ("lies about bases",),
    "test_lies.py::test_a_checkpoint_that_nobody_has_begun_spoils_none": ("lies about marks",),
    "test_disks.py::test_whoever_dies_while_it_writes_begins_again": ("torn",),
    "test_too_much.py::test_a_round_that_is_over_waits_for_no_payload": (
        "contributions given up: no round waits",
    ),
    "test_too_much.py::test_what_finds_no_room_is_left_out_and_the_run_ends": (
        "contributions refused: no-room",
    ),
    "test_too_much.py::test_what_is_not_whole_for_long_is_given_up_and_the_run_ends": (
        "chunks altered for a reader",
        "chunks lost for a reader",
        "contributions refused: incomplete",
        "publications refused: incomplete",
    ),
    "test_power.py::test_whoever_loses_its_power_goes_on_with_what_it_told_as_safe": (
        "files that a power cut took",
        "files told as safe before a power cut",
        "machines without power",
    ),
    "test_told_to_stop.py::test_one_of_each_kind_is_told_to_stop_and_nothing_is_lost": (
        "moments saved at a stop",
        "processes exchanged once all is well",
        "requests answered at a stop",
        "takeovers after a stop",
        "the last one told: evaluation",
        "told to stop: coordinator",
        "told to stop: leader",
        "told to stop: learner",
    ),
    "test_told_to_stop.py::test_supervisors_may_not_wait_for_the_end": (
        "moments of before a stop",
        "told to stop: killed before its end",
        "told to stop: standby",
        "told to stop: told twice",
    ),
    "test_heeded.py::test_what_is_ordered_once_all_is_well_is_so": ("went back once all is well",),
    "test_put_back.py::test_everybody_goes_on_to_the_end_of_the_run": ("hubs restored",),
    "test_islands.py::came_back": ("islands ended", "islands whole again"),
    "test_islands.py::test_a_host_that_dies_ends_the_island": (
        "islands lost a host",
        "islands: a host dies",
        "islands: silent past the limit",
    ),
    "test_islands.py::test_a_host_dies_with_an_order_told_and_not_taken": (
        "islands: a host dies with an order told and not taken",
    ),
    "test_islands.py::test_a_host_that_stands_still_for_a_while_is_named": (
        "islands: a host stands still for a while",
        "told: straggling-host",
    ),
    "test_islands.py::test_a_host_that_stands_still_for_long_ends_the_island": (
        "islands: a host stands still for long",
    ),
    "test_islands.py::test_a_host_whose_link_is_slow_keeps_the_others_waiting_and_no_more": (
        "islands: a host's link is slow",
    ),
    "test_islands.py::test_a_host_that_is_told_to_stop_ends_the_island_in_order": (
        "islands: a host is told to stop",
    ),
    "test_islands.py::test_process_0_that_is_gone_without_a_word_is_missed_by_the_others": (
        "islands: process 0 gone without a word",
        "islands: process 0 silent past the limit",
    ),
    "test_islands.py::test_hosts_carry_their_shares_and_fetch_runs_of_anchors": (
        "islands: a share carried",
        "islands: chunks fetched by another host",
    ),
    "test_islands.py::test_a_host_that_finds_no_hub_comes_later": (
        "islands: a carrier is cut off",
    ),
    "test_islands.py::test_a_host_whose_connection_breaks_carries_again": (
        "islands: a carrier loses the hub",
    ),
}
