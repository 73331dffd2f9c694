"""Flags of every command: numbers that are none, too large, of other scripts; paths; repeats."""

from harness import Attack


def attack(attack: Attack, seed: int) -> None:
    """Every flag of every command with every odd value."""
    attack.command("help", "--help")
