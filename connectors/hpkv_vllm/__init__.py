"""The vLLM connector: one thin object in every rank and in the scheduler that talks to hpkvd."""
