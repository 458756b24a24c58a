"""Unicode for the pre-tokenizer rules: every character reduced to one of seven classes.

Vocabularies were created with rules over Unicode categories, and the result for a character depends on the version of
Unicode. llama.cpp has a table of Unicode 15.1; Python's `unicodedata` and `regex` have others, depending on their
versions. So the general categories of Unicode 15.1 are stored here: runs of equal class over all code points, first the
classes, one byte each, then the run lengths as little-endian base-128 numbers, compressed.
"""

from __future__ import annotations

import zlib
from base64 import b85decode
from functools import cache

import numpy as np
from numpy.typing import NDArray

from llamado.text.tokenizer.parts import PART_LENGTH, parts_of

# ASCII characters are unchanged in a reduced text; any other character becomes one of these.
OTHER = "\x80"
NUMBER = "\x81"
LETTER = "\x82"
PUNCTUATION = "\x83"
MARK = "\x84"
SYMBOL = "\x85"
SPACE = "\x0b"  # an ASCII space that the rules do not mention

_CLASSES = OTHER + NUMBER + LETTER + PUNCTUATION + MARK + SYMBOL  # by class number in the table

# White_Space of Unicode beyond ASCII
WHITESPACE = (0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)

_RUNS = 2244
_TABLE = (
    "c-oy;O^9Vj6~5=xsrys!-gn=7{kmWOOuzTK)6?_Q-P1k)6CGolF(boB6vPSRLJ_0l4;WAobR!{{MT{r`7g+@SVHScAH<8I|5JgY}vxvc!41zzP1X"
    "n{AS@@k(_szVX?oqL;@9nx(r|O*Zo$s8gPMk+0Jghx?B~35!q<@Gp&wjcIUI{x+yuPg2Xkw!-@rk&m*-)ZNytu@%U@w7?B#;+8grzRQnCL4ZykJZ"
    "sUWaU0XZ58@5*?7qlo}=pPc@syJF#KGcIJd6d&P8q()5dTv*f_7ntcEV%R?k4GM*_BPWHEnkjmVb*t6U=NF4SM_iznnLzHeDRkJ86-(%fm9V}|l^"
    "@i89U5a5NOa`w-34n<<XOsFz_rZuoQCC?Ary7ZGc60}MzXu5iP2RfB;;gZEWZtn^+8CrTfQ4!qV1WhnfW<H=v4t^!>YmaoF;OgGmqey$>;#5upBf"
    ">xf*NaG^s(9d!1x*KjebgbGat$=PaG%)@Ewz4qs&h{KeQ3VVlqIIfHVT`?lp|56iiTJPjtJ3IA!Q)qQwTJG>1K5ToYDJ6iv=%8%+Y++?2+q?s&^r"
    "HvEyTiV%X}8-MS!#8OqsYt|TkVk?z<2B>ir2q^NxlYmB2v){uP)hQ1ouA!>sf*y2Lrc5#FxEKcXHDzNI5@V*4YJWMK;$#GCuL7ssQ9R;o!$0MRQi"
    "LKSji_WiySMJYQT?8v)}YBsGJvd_X_qGDs^K*03}UZIVpS(9BKvjsv{RE8Y{{K8c&l^_K@$uzw5@A}m@Iady_R2=5?Z9ms&>pU%l9ernW~3XMoA`"
    "J(NiLEF@+pArOL&$)=#S(QHhmPzHjU#(oMq3#FQi+6iuy<9W^xK7w3&%(?zt|Wr9_MFPXL`#bXsxI!`P!N0a-WQ=EzTN<0l|vL#Jq8!GQRTlP1js"
    "+FurGSJLwto3bYzn}RJYX?=9q$%35(j~I*jI+ml@-a14CCju@YEED!nr4K)|5uy-lka;P`Q-m^bl};#;wU8v2*si!qD4HkN?L32gWQN6M*|wsZ=I"
    "BFpW(av3?u-6N$9#heT-fp%5D&?Go{BEjNT$$4S{?~gu7ZPxdri!*??uAfizLdD4HBF*M{J5iLbY)9aakPMAyy<6{P2SO$(5rmY=7z$dAv{$~i|p"
    "$^vtsj-#BJ=X67-7G<pZbF$NxA(N^X7)m9IsaepBxI@rU22ZdR90|@8Mj5ZRlO88jvns-9O81pT2~(E2Mi*SdLn(F@7qvozD?u%%_N3IVa_@74w4"
    "=+>lg#QCtCGyTpePWchA5JnM1a~-)W~BTXAlLr0Od1gUC+(K2jUD<DGbO{06^sqMuf7Q0v}epJk8^c-3l$SswA+C$<@%#X`d((Ag49yL!w1%uqh?"
    "IsUF_wQ%F;>D<nLxN^B&&uAA}(y`dq^Z1pibEBC%?dKB+V?25kYg!Gzv^iP=IrA2mEoy)VH6f=&C9+#C8pgc2nMlTL&NLw18^m^ub6`C%G5pXE=N"
    "*so;Z&MZ_u{!X~X9F!W=@P_?M<@MuH+LZmh0<zRaoB9<vetJ#I2YEq$TryJxuaQ82SK-6wEF`k%{rbuB0(cQYmrf?g#mPhz#{nF`MggRm0ehwB8b"
    "Z6%B|EZHDDkmg!5^GCbe)C@bLJwo>1?wEc3gx(3-vY<lNt-Jv_;y@RFN*zl`}V^O(Ny7Z4T~0BjSny#NE+G$@oK(`~#>V=h-0>3aDVEp{w-0+&>z"
    "dVg24U$cz(1TLE!^hun6VZ7F&&WOS=r+OTY)VKK7>D?E9M(%uZf?s6Bhx^+CevJ5X;4~i;{CVE>#+><%(QW|4Tq@}q$@x?-M~r%@)07W~avoGIT6"
    "VJCu8bR=Lhy8~U0C*jX#)iIlv0gt&w0l!H8rGwJT(V5P!i;;IXEBEpFC9#<m7XYzs>x`^{n(>nOl)>D$JL=oqsTQcKIBzC<WZ=JOZF1b#NztUNdB"
    "0nai#_(}w(nzKQ|ZBF&H{dwcbp-pQ6L9_<3Q%F*@~Jqv$M*0dyJDf-9-zwZ5zkRIqBe?=*}CTnsuKhvTX)m9#wzn6Z&#azheQ#ww?6IzQlm1aCZa"
    "t=5f<;4!vdOrvF7Cr4=KvnAS2@RtcU<@|nno(p$23jw>aZZQeRaTsH*&OFHKJR5xW*@zB{&aOZgB5wW!6WF>dU4e)2g>JK;^%rI>$6#ZP`I;oCPO"
    "WNg>1Eyrqx0gQn%JdsIV%31h2yFv_&F=VM4#vqlFUbL62E7!?Qr?cIiVZ(*+Ta6-2Fc9=Vt~{{o%ui4PiPH{9uKQ4Kd}JL6&?yt>nM)Cy@evr%d7"
    "Jh#NPlt`?bv{}>ByEA1DH^2e{e0Jmjx*}Z8`ABAEg_bBB%?MG*sdWNJfv>J);Vw$xVIA^e+3^t8wXdjs>ye?E+K{R@WBa!P)&Dh~L7jqe6|KVPDq"
    "N#_cDbULv(J5neCt>A`~Ii7dNuD*TK{zP8@YMureq`K_D4`^hRX1rOv44HWB*w{^Qzw+$Y-x&<a{R8uKM5N_B-48TgCC>Z%>E;_G47VWj+2R|Bid"
    "E_a$Gs0!I;M?yQ~QLGiVVcPSj<i{7Pq&e>4jH~YAwZ}iK4`Bbs+Jbj!#q=96GrnEBt0jt^>9YT<hAmH|!%nP)D1AOm;to@dpms2@Xg?;U*zMYTK^"
    "bc6uWecW%Y=xfLa#_aU1>NEybvFfheA^w8@K@Xflr1&=8iz=B?1T6O8sAUftJUGdTU7rN^Gg)(5JAr=(j<(v(9z^>5r6bc5fKvz)Ybp)sC$OL%bW"
    "6aSp%k;4u|T8bYZ#Llp^DH`ZE17lP(JJ*X2_wPJ+6W3kd7ce8~Ldn_RY8!90OOuPvHAFCh|#!?*K0Z}9l_ar!6XXSdove^33k{AlJC`E%=c>;BI8"
    "_Ujw}qVK)i`Zqe*t+N"
)


@cache
def class_table() -> NDArray[np.uint8]:
    """Return the Latin-1 code of each code point in a reduced text; uint8[0x110000]."""
    packed = np.frombuffer(zlib.decompress(b85decode(_TABLE)), np.uint8)
    codes = np.frombuffer(_CLASSES.encode("latin-1"), np.uint8)[packed[:_RUNS]]
    digits = packed[_RUNS:]
    last = digits < 0x80
    first = np.flatnonzero(np.concatenate(([True], last[:-1])))
    place = np.arange(len(digits)) - np.repeat(first, np.diff(np.append(first, len(digits))))
    lengths = np.add.reduceat((digits & 0x7F).astype(np.int64) << (7 * place), first)
    table = np.repeat(codes, lengths)
    table[:0x80] = np.arange(0x80)
    table[list(WHITESPACE)] = ord(SPACE)
    return table


def reduce(text: str) -> str:
    """Return `text` with each character beyond ASCII replaced by its class: same length, Latin-1."""
    if text.isascii():
        return text
    if len(text) > PART_LENGTH:
        return "".join(map(reduce, parts_of(text)))
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return class_table()[points].tobytes().decode("latin-1")
