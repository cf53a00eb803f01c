"""Patterns for torch 2.13; made by kwtrace, not to be edited."""

RULES = {
    'attention': '0518a27f28e4436b68e355a2afbc9cf957300ef671148046dfdb1ee815605cfe',
    'attention_grouped': 'e4838057828396fac5b60baa353e79b4efa21f9db7e82bd0c4eae4e8436f5d6e',
    'mm_act': '8ab9b38e890c3b1a65ee93658ac0cc20f14598c6403335aea9734ea6641cef17',
}
