"""What is wrong with this machine for HPKV: facts are gathered in one place and judged, purely, in another."""
