"""``python -m hpkv_daemon`` is ``hpkvd``."""

from hpkv_daemon.cli import main

if __name__ == "__main__":
    main()
