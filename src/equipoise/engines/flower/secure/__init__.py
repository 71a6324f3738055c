"""Secure sums over a network, and the protections that are built on them.

The masking protocol sums integers, and the server learns nothing but the sum: masks cancel, and shares stand in for clients
that leave.

One `MaskingServer` and one `MaskingClient` per node, all on the same `SumTerms`, exchange four requests and answers, as bytes:

    invitation →  ← keys        two public keys of each client: one for letters to other clients, one for masks
    roster     →  ← shares      shares of a seed b and of the masking key s, sealed for each other client
    inbox      →  ← masked      y_u = x_u + PRG(b_u) + Σ_{v > u} PRG(s_uv) − Σ_{v < u} PRG(s_uv)  modulo M
    survivors  →  ← revealed    of each survivor a share of b, of each that left after sharing a share of s

s_uv is agreed by Diffie–Hellman, so that pairwise masks cancel in the sum; b is there because an answer that comes late must
stay hidden although the masks it shares with others were given up. Up to (clients − threshold) clients may leave at any step.

    server = MaskingServer(SumTerms("a", 3, "updates", names, length=D, modulus=2**48, threshold=67, fewest=67))
    requests = server.start()
    while requests:
        requests = server.advance(send(requests))     # {client: bytes} → {client: bytes}; who is silent is left out
    server.total, server.survivors, server.faults

    client = MaskingClient(invitation, "me")           # on the node
    client.keys()                                      # then client.answer(request, values) for each later request

**Masks are used once.** Keys and seeds are drawn for one sum, and HKDF ties what is made of them to its terms. Keys that served
several sums would be cheaper and wrong: whoever survives one sum has given up its b, and if it leaves in a later one its s is
given up too, and with both its values in the first sum. Sums that are foreseen can be prepared together instead: the first two
exchanges of many sums may travel in the same messages, as they do not depend on values.

**What is assumed.** The server follows the protocol and delivers public keys as they are (messages travel over TLS between
authenticated nodes), but looks at all it gets, together with up to threshold − 1 clients. It then learns the sum over the
survivors and who they are; with its accomplices' own values it knows the sum over the others, so that `fewest` should exceed
their number by the size of the crowd one wants to hide in. A server that lies about who survived is kept, by clients who reveal
once, one kind of share per peer, and by 2 · threshold > clients, from both secrets of a client, unless 2 · threshold − clients
clients help it. A server that replaces public keys, or invites nodes of its own, is not kept from anything by a plain sum.
Clients that send wrong values spoil the sum unnoticed; wrong shares are noticed.

**Signed sums** are against such a server. Clients have long-lived keys that their owners have exchanged (`identities`). They
sign the keys of the sum, and with their masked values a hash of what these were made of. One exchange is added:

    confirm    →  ← signed      each client signs who survived, once, if all survivors have signed the same hash as itself

and the survivors' request brings these signatures: a client reveals shares only if as many clients as the sum needs have signed
the list that it has signed itself. With 2 · threshold > clients + colluders no two lists can both have enough signatures.

Source: Bonawitz et al. 2017, Figure 4; signed sums with its signatures and check of consistency. The hash is ours.
"""
