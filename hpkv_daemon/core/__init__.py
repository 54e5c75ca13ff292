"""Pure decisions: which blocks are resident, who may read them, which slot to use, what to evict."""
