"""The hook table: which surface of SGLang gets which function of ours, in which modes, and why."""

from __future__ import annotations

from ..modes import MODES
from . import checkpoints, flags, host_tier, observe, radix_cache, rewind, sleep, startup, step, transfer
from .registry import Hook

#: Modes in which SGLang does not serve unchanged.
OURS = frozenset(name for name, mode in MODES.items() if not mode.stock)
#: Modes with a mamba pool of their own.
OWN_POOL = frozenset(name for name, mode in MODES.items() if mode.pool is not None)

#: Modes in which requests' states can be rewound.
REWINDS = frozenset(name for name, mode in MODES.items() if mode.rewinds)

TABLE: tuple[Hook, ...] = (
    *flags.HOOKS,
    Hook("check_server_args", "AFTER", startup.refuse_early, OURS, "decline before anything is started"),
    Hook("check_server_args", "AFTER", startup.load_plugins_in_actors, OURS, "Ray's actors load plugins too"),
    Hook("handle_ngram", "AROUND", startup.ngram_drafts_trees, OURS, "NGRAM at breadth 1 still drafts trees"),
    Hook("track_entry", "AFTER", rewind.track_where_there_is_a_slot, REWINDS, "a prefill without a snapshot slot"),
    Hook("handle_linear_attn", "AFTER", startup.verify_with_ours, OWN_POOL, "FlashInfer's verify is not derived"),
    Hook("track_entry", "AFTER", step.collect_track_entry, OURS, "host copy of one request's tracking"),
    Hook("prepare_for_extend", "AROUND", step.collect_track_entries, OURS, "host copies for the whole batch"),
    Hook("pad_inputs", "AROUND", step.keep_track_entries, OURS, "and for a batch that is padded"),
    Hook("attn_backend_wrapper", "AROUND", startup.build_attention_backend, OURS, "our linear-attention backend"),
    Hook("init_attention_backends", "AFTER", startup.announce, OURS, "proof before the first forward, log line"),
    Hook("build_request_pool", "AROUND", startup.build_request_pool, OWN_POOL, "the mode's mamba pool"),
    Hook("build_decode_pool", "AROUND", startup.build_request_pool, OWN_POOL, "and a decode server's"),
    Hook("size_mamba_pool", "AROUND", startup.size_mamba_pool, OWN_POOL, "bytes saved become state slots"),
    Hook("slots_per_request", "AROUND", startup.slots_per_request, REWINDS, "two state slots a request, not five"),
    Hook("prepare_for_caching", "AROUND", rewind.offer_to_radix_cache, REWINDS, "its own slot at its exact length"),
    Hook("cleanup_after_caching", "AROUND", rewind.after_the_offer, REWINDS, "and who owns that slot from then on"),
    Hook("can_cache_finished", "AROUND", rewind.can_be_cut_back, REWINDS, "also where it ends inside an accepted run"),
    Hook("prepare_for_caching", "BEFORE", radix_cache.before_donation, OWN_POOL, "a donated slot holds all its tokens"),
    Hook(
        "prepare_for_caching",
        "BEFORE",
        radix_cache.forget_snapshot_past_the_key,
        OURS,
        "nor a snapshot ahead of its key",
    ),
    Hook(
        "track_indices", "AFTER", radix_cache.track_only_into_own_snapshots, OURS, "nothing is tracked into freed slots"
    ),
    Hook("track_indices", "AROUND", rewind.track_nothing_in_a_verify, REWINDS, "no look-up, and no wait for the draft"),
    Hook(
        "accept_grammar", "AROUND", radix_cache.drop_state_past_a_grammar, OURS, "no state is cached ahead of its key"
    ),
    Hook("lazy_prepare", "AFTER", radix_cache.forget_overwritten_snapshots, OURS, "nor a snapshot written over"),
    Hook("release_memory", "BEFORE", sleep.fall_asleep, OURS, "memory is given back when nobody works on it"),
    Hook("resume_memory", "AFTER", sleep.wake, OWN_POOL, "memory comes back from sleep with its contents lost"),
    Hook("states_leave", "BEFORE", host_tier.states_leave, OWN_POOL, "a state goes to the host with all its tokens"),
    Hook("states_arrive", "AROUND", host_tier.states_arrive, OWN_POOL, "and what was known of its slot is forgotten"),
    Hook("host_pools", "AROUND", host_tier.copy_every_layer, OURS, "layers are copied by number, not by count"),
    Hook("checkpoint_stored", "AROUND", checkpoints.state_is_quantised, OWN_POOL, "int8 is made of all its tokens"),
    Hook("checkpoint_loaded", "BEFORE", checkpoints.state_is_loaded, OWN_POOL, "and loaded into a slot that forgets"),
    Hook("back_up", "AROUND", host_tier.back_up, OURS, "no more on the way to the host than slots can be spared"),
    Hook("load_back", "AROUND", host_tier.load_back, OURS, "a prefill behind a state that could not be loaded"),
    Hook("slots_freed", "BEFORE", transfer.slots_are_freed, OWN_POOL, "its last verify may still be at work"),
    Hook("preallocated", "AFTER", transfer.slot_is_promised, OWN_POOL, "and no state may arrive before that is done"),
    Hook("transferred", "AFTER", transfer.state_has_arrived, OWN_POOL, "what was known of its slot is forgotten"),
    Hook("update_running", "AROUND", transfer.count_before_a_retraction, OURS, "a kept state holds what is counted"),
    Hook("release", "BEFORE", radix_cache.cache_no_state_past_its_key, OURS, "nor a state that cannot be cut back"),
    Hook(
        "prefill_result", "AROUND", radix_cache.count_what_a_tail_ends_with, OURS, "nor with a token more than its key"
    ),
    Hook("mixed", "AFTER", radix_cache.forget_snapshots_that_mixing_drops, OURS, "nor a snapshot that nobody took"),
    Hook("run_batch", "BEFORE", step.advance_the_grammars_of_tails, OURS, "a tail's token fits all that it has said"),
    Hook("plan_stream", "AROUND", step.plan_behind_the_forward, OURS, "a step is not prepared over the last one"),
    Hook("metrics_reporter", "AFTER", observe.watch_scheduler, OURS, "a scheduler's observer"),
    Hook("report_decode_stats", "AROUND", observe.watch_decode, OURS, "accept length of every log interval"),
    Hook("log_stats", "AFTER", observe.publish, OURS, "our Prometheus metrics beside SGLang's"),
    Hook("internal_state", "AFTER", observe.tell_internal_state, OURS, "mamba_mtp in /server_info"),
    Hook("verify_block", "BEFORE", step.track_in_a_block, OURS, "DFLASH tracks as other drafts do"),
    Hook("commit_block", "AROUND", step.commit_block, OURS, "and takes the snapshots that it counts on"),
    Hook("commit", "AROUND", step.commit, OURS, "the mode records what a verify accepted"),
)


def active(mode: str) -> list[Hook]:
    """The rows registered in ``mode``, for the installed SGLang."""
    return [hook for hook in TABLE if mode in hook.modes and hook.target.is_needed()]
