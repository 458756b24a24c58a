// Autoscroll: keep a growing list at its end until the user scrolls up.
import type { HTMLAttributes, RefObject } from "preact";
import { useLayoutEffect, useMemo, useState } from "preact/hooks";

const NEAR_END = 60; // pixels
const AT_END = 8;
const KEYS_UP = ["PageUp", "ArrowUp", "Home"];

export interface Autoscroll {
  isFollowing: boolean;
  /** Scroll to the end and stay there. */
  scrollToEnd: () => void;
  /** Event handlers of the scrolled element. */
  on: Pick<HTMLAttributes<HTMLDivElement>, "onWheel" | "onKeyDown" | "onTouchStart" | "onTouchMove" | "onScroll">;
}

/**
 * Keep the scrolled `element` at its end while `content`, its only child, changes its height. Scrolling up with the wheel,
 * a key, a finger or the scroll bar stops that; scrolling down to the end, `scrollToEnd` or a new `subject` starts it
 * again.
 */
export function useAutoscroll(element: RefObject<HTMLElement | null>, content: RefObject<HTMLElement | null>, subject: string): Autoscroll {
  const [isFollowing, setFollowing] = useState(true);
  const handlers = useMemo(() => {
    let follows = true;
    let top = 0;
    let height = 0;
    let viewport = 0;
    let touchedAt = 0;

    function setFollows(value: boolean): void {
      follows = value;
      setFollowing(value);
    }
    function remember({ scrollTop, scrollHeight, clientHeight }: HTMLElement): void {
      top = scrollTop;
      height = scrollHeight;
      viewport = clientHeight;
    }
    function scrollToEnd(): void {
      const { current } = element;
      if (!current) return;
      current.scrollTop = current.scrollHeight;
      remember(current);
    }
    function stopFollowing(): void {
      const { current } = element;
      if (current && current.scrollHeight > current.clientHeight) setFollows(false);
    }
    return {
      follow: () => {
        setFollows(true);
        scrollToEnd();
      },
      resized: () => {
        if (follows) scrollToEnd();
      },
      // Input events precede the scrolling that they cause: text that arrives in between must not undo it.
      on: {
        onWheel: (event: WheelEvent) => event.deltaY < 0 && !event.ctrlKey && stopFollowing(),
        onKeyDown: ({ key, shiftKey, target }: KeyboardEvent) => {
          const isTyped = (target as Element).closest("textarea, input") !== null;
          if (!isTyped && (KEYS_UP.includes(key) || (key === " " && shiftKey))) stopFollowing();
        },
        onTouchStart: (event: TouchEvent) => (touchedAt = event.touches[0]!.clientY),
        onTouchMove: (event: TouchEvent) => event.touches[0]!.clientY > touchedAt && stopFollowing(),
        // Scroll bar, search in the page, focus. Changes of the heights scroll too: of the content, and of the composer below.
        onScroll: () => {
          const { scrollTop, scrollHeight, clientHeight } = element.current!;
          const left = scrollHeight - scrollTop - clientHeight;
          if (scrollTop < top && scrollHeight >= height && clientHeight === viewport && left > AT_END) setFollows(false);
          else if (scrollTop > top && left < NEAR_END) setFollows(true);
          remember(element.current!);
        },
      },
    };
  }, []);

  useLayoutEffect(handlers.follow, [subject]);
  useLayoutEffect(handlers.resized); // before the browser paints
  useLayoutEffect(() => {
    // Heights also change later: messages are laid out when they scroll into view, code is colored, the composer grows.
    const sizes = new ResizeObserver(handlers.resized);
    sizes.observe(element.current!);
    sizes.observe(content.current!);
    return () => sizes.disconnect();
  }, []);
  return { isFollowing, scrollToEnd: handlers.follow, on: handlers.on };
}
