"""Requests that violate HTTP/1.1. The server must answer each with 400 and close the connection."""

from __future__ import annotations

POST = b"POST /rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"

BROKEN = {
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "two equal lengths": POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "list of lengths": POST + b"Content-Length: 2, 2\r\n\r\n{}",
    "signed length": POST + b"Content-Length: +2\r\n\r\n{}",
    "negative length": POST + b"Content-Length: -2\r\n\r\n{}",
    "bare LF": b"GET /livez HTTP/1.1\nHost: localhost\n\n",
    "bare LF in the headers": b"GET /livez HTTP/1.1\r\nHost: localhost\nA: b\r\n\r\n",
    "folded header": GET + b"A: b\r\n c\r\n\r\n",
    "folded first header": b"GET /livez HTTP/1.1\r\n Host: localhost\r\n\r\n",
    "space before the colon": b"GET /livez HTTP/1.1\r\nHost : x\r\n\r\n",
    "no header name": GET + b": b\r\n\r\n",
    "NUL in a header": GET + b"A: b\x00c\r\n\r\n",
    "CR in a header": GET + b"A: b\rc\r\n\r\n",
    "no host": b"GET /livez HTTP/1.1\r\n\r\n",
    "a host of two words": b"GET /livez HTTP/1.1\r\nHost: x y\r\n\r\n",
    "half an address": b"GET /livez HTTP/1.1\r\nHost: [::1\r\n\r\n",
    "two hosts": GET + b"Host: y\r\n\r\n",
    "bad chunk size": CHUNKED + b"zz\r\n\r\n",
    "hex prefix": CHUNKED + b"0x1\r\nA\r\n0\r\n\r\n",
    "huge chunk size": CHUNKED + b"fffffffffffffffff\r\nA\r\n0\r\n\r\n",
    "chunk with LF": CHUNKED + b"1\nA\n0\n\n",
    "chunk longer than said": CHUNKED + b"1\r\nAB\r\n0\r\n\r\n",
    "LF in a chunk extension": CHUNKED + b"1;a\nb\r\nA\r\n0\r\n\r\n",
    "close in a trailer": CHUNKED + b"1\r\n{\r\n0\r\nConnection: close\r\n\r\n",
    "close in a proxy's trailer": CHUNKED + b"1\r\n{\r\n0\r\nProxy-Connection: close\r\n\r\n",
    "length in a trailer": CHUNKED + b"1\r\n{\r\n0\r\nContent-Length: 1\r\n\r\n",
    "identity coding": POST + b"Transfer-Encoding: identity\r\n\r\n{}",
    "coding that is no coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked not last": POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "chunked after gzip": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked after gzip, in two lines": POST
    + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"POST /rank HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "lower-case method": b"get /livez HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a tunnel": b"CONNECT x:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}
