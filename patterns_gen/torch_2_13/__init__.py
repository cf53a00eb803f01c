"""Patterns for torch 2.13; made by kwtrace, not to be edited."""

RULES = {
    'mm_act': '8ab9b38e890c3b1a65ee93658ac0cc20f14598c6403335aea9734ea6641cef17',
}
