"""MaxText over several clusters: ``python -m jax_hetccl.integrations.maxtext base.yml key=value ...``.

``names`` (what is replaced in MaxText; pure), ``settings`` (arguments, and what is refused; pure) <- ``gradients``, ``data``,
``state`` (the replacements) <- ``install`` <- ``__main__``. docs/maxtext.md says what is replaced and why.
"""
